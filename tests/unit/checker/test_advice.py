"""Every sentence that ends with exit code 2 names what to do, and doing it gives a verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads import checker

pytestmark = pytest.mark.usefixtures("one_thread", "quick")


class Layer(nn.Module):
    """Self-attention of x `[b, t, e]`."""

    names = ("q", "k", "v", "o")

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        for name in self.names:
            self.add_module(name, nn.Linear(embed_dim, embed_dim))

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v, o = (self.get_submodule(name) for name in self.names)
        heads = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        return o(out.nan_to_num().transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


class Unnamed(Layer):
    names = ("alpha", "beta", "gamma", "delta")


class MultiNumber(nn.Module):
    """Several heads, and no attribute says how many."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Scores(nn.Module):
    """No parameters."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value)


class Flavored(Layer):
    def __init__(self, embed_dim: int, num_heads: int, flavor: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.flavor = [None][flavor]


class Slow(Layer):
    def __init__(self, embed_dim: int, num_heads: int, seconds: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads)
        if seconds > 1:
            raise ValueError("that takes too long")


class Zest(Layer):
    def forward(self, x: Tensor, zest: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(x, zest)


class Salted(Layer):
    def forward(self, x: Tensor, zest: Tensor, salt: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(x, zest & salt)


class Masked(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and mask.dtype != torch.int64:
            raise TypeError("give lengths")
        if mask is None:
            return self.attend(x)
        return self.attend(x, (torch.arange(x.shape[1]) < mask[:, None])[:, None, None])


class Extra(Layer):
    def forward(self, x: Tensor, head_mask: Tensor | None = None) -> Tensor:
        return self.attend(x)


class Warped(Layer):
    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.warp = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.warp(x).sin() if isinstance(self.warp, nn.Linear) else self.warp(x))


class Shifted(Layer):
    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.shift = nn.Parameter(torch.zeros(embed_dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x + x.flip(-1) * self.shift)


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("target", "options", "words", "advice"),
    [
        (Unnamed, {}, ["no weights for q and k and v", "--weights q=...,k=...,v=...,o=..."],
         {"weights": {"q": "alpha", "k": "beta", "v": "gamma", "o": "delta"}}),
        (MultiNumber, {}, ["--heads N"], {"heads": 4}),
        (Scores, {"like": "multihead"}, ["no parameters", "--like attention"], {"like": "attention"}),
        (Flavored, {}, ["'flavor'", "--init 'flavor="], {"init": "flavor=0"}),
        (Flavored, {"init": "flavor=1"}, ["Give others with --init"], {"init": "flavor=0"}),
        (Slow, {"init": "secs=2"}, ["for --init (embed_dim, num_heads, seconds)"], {"init": "seconds=1"}),
        (Salted, {}, ["--arg zest=ROLE --arg salt=ROLE"], {"args": {"zest": "mask", "salt": "mask"}}),
        (Zest, {"args": {"zest": "zest"}}, ["--arg zest=ROLE"], {"args": {"zest": "mask"}}),
        (Zest, {"args": {"salt": "mask"}}, ["for --arg (x, zest)"], {"args": {"zest": "mask"}}),
        (Zest, {"like": "multihead"}, ["--arg zest=ROLE"], {"like": "self", "args": {"zest": "mask"}}),
        (Masked, {}, ["give lengths", "--arg mask=ROLE"], {"args": {"mask": "lengths"}}),
        (Extra, {}, ["head_mask", "--arg head_mask="], {"args": {"head_mask": "ignore"}}),
        (Layer, {"like": "cube"}, ["--like attention, self"], {"like": "self"}),
        (Layer, {"layout": "rows"}, ["--layout batch"], {"layout": "batch"}),
        (Layer, {"heads": 0}, ["--heads"], {"heads": 4}),
        (Layer, {"strict": "rows"}, ["--strict all, empty-rows"], {"strict": "empty-rows"}),
        (Layer, {"weights": {"q": "alpha"}}, ["got 'alpha' for q"], {"weights": {"q": "q"}}),
        (Layer, {"weights": {"query": "q"}}, ["in --weights"], {"weights": {"q": "q"}}),
        (Layer(24, 4), {"init": "num_heads=4"}, ["Leave out --init"], {}),
        (Layer, {"like": "classic.q.Q"}, ["--like classic.MODULE.CLASS"], {"like": "self"}),
        (Layer, {"init": "4 heads"}, ["for --init"], {"init": "num_heads=4"}),
        (Layer, {"like": "rotary"}, ["--like"], {"like": "self"}),
    ],
)  # fmt: skip
def test_advice_can_be_followed(
    target: Any, options: dict[str, Any], words: list[str], advice: dict[str, Any]
) -> None:
    sentence = unclear(target, **options)
    assert all(word in sentence for word in words), sentence
    found = checker.check(target, **advice)
    assert found.verdict in ("passed", "failed"), found


def unclear(target: Any, **options: Any) -> str:
    """Return the sentence of an error or of a report that ends with exit code 2."""
    try:
        found = checker.check(target, **options)
    except checker.Unclear as error:
        return str(error)
    assert found.verdict == "not judged", found
    return "\n".join(found.words())


@pytest.mark.every(2)
@pytest.mark.parametrize("target", [Warped, Shifted])
def test_parameters_besides_attention_are_named(target: type[nn.Module]) -> None:
    sentence = unclear(target)
    assert "something besides attention is in it: the parameter" in sentence
    assert "check a module or a function without the rest" in sentence
