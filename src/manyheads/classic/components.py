"""Presentation 3: single heads put together, batch first, `[N, L, D]`.

A decoder's version of each is the same thing with a mask of ours: `forward(x, mask=Causal())`.

`attention`, `SelfAttention`, `CrossAttention` and `MultiHeadedAttention` are those of Vaswani et al. 2017
(arXiv:1706.03762), section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from manyheads import functional
from manyheads.classic.common import check, mix, weigh
from manyheads.maps import AttentionMap
from manyheads.masks import Mask
from manyheads.positions import Sinusoidal
from manyheads.shapes import kind, sizes, whole


class PositionalEncoder(nn.Module):
    """x · √d_model plus the sinusoidal encoding of positions (Vaswani et al. 2017, section 3.5).

    PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i + 1) = cos(the same angle): sine and
    cosine share an angle. (Another common reading puts twice the *index* in the exponent, so that
    the cosine has an angle of its own; that isn't the paper's.)

    d_model: the model size, an even number. max_seq_len: how many positions the buffer `pe`,
    `[1, max_seq_len, d_model]`, holds; it isn't learned. TypeError or ValueError for other numbers.
    """

    pe: Tensor

    def __init__(self, d_model: int, max_seq_len: int = 80) -> None:
        super().__init__()
        whole(d_model, "d_model", least=2)
        whole(max_seq_len, "max_seq_len", least=1)
        if d_model % 2:
            raise ValueError(
                f"d_model must be even, as each angle has a sine and a cosine, and {d_model} came: "
                f"use {d_model + 1}."
            )
        self.d_model = d_model
        positions = torch.arange(max_seq_len)
        self.register_buffer("pe", Sinusoidal(d_model).encode(positions)[None])  # [1, max, d]

    def forward(self, x: Tensor) -> Tensor:
        """x `[N, L, d_model]` → x · √d_model + pe, the same shape and dtype.

        TypeError or ValueError for another x, or a longer one than the buffer.
        """
        check(x, "x", "N", "L", self.d_model)
        length, longest = x.shape[1], self.pe.shape[1]
        if length > longest:
            raise ValueError(
                f"x {sizes(x)} has {length} positions, and this encoder holds max_seq_len={longest}: "
                f"make it as PositionalEncoder({self.d_model}, max_seq_len={length})."
            )
        return x * math.sqrt(self.d_model) + self.pe[:, :length].to(x.dtype)  # [N, L, d]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ / √d_k) v and its weights: one head, `F.scaled_dot_product_attention`'s numbers.

    q `[N, L, d_k]`, k `[N, S, d_k]`, v `[N, S, d_v]` → output `[N, L, d_v]`, weights `[N, L, S]`.
    Raises ValueError, naming both, if the widths of q and k differ, TypeError for what are no floats or no
    mask.
    """
    _check_heads(q, k, v)
    heads = q[:, None], k[:, None], v[:, None]  # [N, 1, L, d_k], …
    weights = weigh(*heads, mask=mask)  # [N, 1, L, S]
    return mix(weights, heads[2]).squeeze(1), weights.to(q.dtype).squeeze(1)


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x, letters in (("q", q, "N L d_k"), ("k", k, "N S d_k"), ("v", v, "N S d_v")):
        check(x, name, *letters.split())
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q and k must have one width d_k, and q is {q.shape[2]} wide {sizes(q)}, "
            f"k {k.shape[2]} {sizes(k)}: project them to the same width."
        )
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"q, k and v must share N, and k and v their length, and q {sizes(q)}, k {sizes(k)}, "
            f"v {sizes(v)} came."
        )


class CrossAttention(nn.Module):
    """One head: queries from x, keys and values from y.

    x_input_dim, y_input_dim: the widths of x and y; key_dim: that of queries and keys; output_dim:
    that of values and the output. The layers are `linear_q`, `linear_k`, `linear_v`. TypeError or
    ValueError unless all are at least 1.
    """

    def __init__(self, x_input_dim: int, y_input_dim: int, key_dim: int, output_dim: int) -> None:
        super().__init__()
        whole(x_input_dim, "x_input_dim", least=1)
        whole(y_input_dim, "y_input_dim", least=1)
        whole(key_dim, "key_dim", least=1)
        whole(output_dim, "output_dim", least=1)
        self.linear_q = nn.Linear(x_input_dim, key_dim)
        self.linear_k = nn.Linear(y_input_dim, key_dim)
        self.linear_v = nn.Linear(y_input_dim, output_dim)

    def forward(self, x: Tensor, y: Tensor, mask: Mask | None = None) -> Tensor:
        """x `[N, L, x_input_dim]`, y `[N, S, y_input_dim]` → `[N, L, output_dim]`, under a mask of ours.

        TypeError or ValueError for others.
        """
        return functional.attention(*self._heads(x, y), mask=mask).squeeze(1)

    def attend(self, x: Tensor, y: Tensor, mask: Mask | None = None) -> tuple[Tensor, AttentionMap]:
        """The output and its map `[N, 1, L, S]`; arguments as `forward`, TypeError or ValueError too."""
        out, amap = functional.attention_with_map(*self._heads(x, y), mask=mask)
        return out.squeeze(1), amap

    def _heads(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check(x, "x", "N", "L", self.linear_q.in_features)
        check(y, "y", "N", "S", self.linear_k.in_features)
        if x.shape[0] != y.shape[0]:
            raise ValueError(f"x and y must share N, and x {sizes(x)} and y {sizes(y)} came.")
        q, k, v = self.linear_q(x), self.linear_k(y), self.linear_v(y)
        return q[:, None], k[:, None], v[:, None]  # [N, 1, L, d_k], [N, 1, S, d_k], [N, 1, S, d_v]


class SelfAttention(CrossAttention):
    """One head over its own input. Permuting the input permutes the output: it knows no order.

    input_dim: the width of x; key_dim: that of queries and keys; output_dim: that of values and the
    output. TypeError or ValueError unless all are at least 1.
    """

    def __init__(self, input_dim: int, key_dim: int, output_dim: int) -> None:
        whole(input_dim, "input_dim", least=1)
        super().__init__(input_dim, input_dim, key_dim, output_dim)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:  # type: ignore[override]
        """x `[N, L, input_dim]` → `[N, L, output_dim]`; TypeError or ValueError for another x or mask."""
        return super().forward(x, x, mask)

    def attend(  # type: ignore[override]
        self, x: Tensor, mask: Mask | None = None
    ) -> tuple[Tensor, AttentionMap]:
        """The output and its map `[N, 1, L, L]`; arguments as `forward`, TypeError or ValueError too."""
        return super().attend(x, x, mask)


class MultiHeadedAttention(nn.Module):
    """Single heads side by side: their outputs concatenated, then one linear layer.

    attn_modules: `SelfAttention`s or `CrossAttention`s, or what has a `linear_v` as they have, whose
    width is read off; final_output_dim: the width of the output. Kept as `module_list`, `linear`.
    TypeError for other modules, ValueError for none, either for another width.
    """

    def __init__(self, attn_modules: Iterable[nn.Module], final_output_dim: int) -> None:
        super().__init__()
        heads = list(attn_modules)
        if not heads:
            raise ValueError("attn_modules must hold at least one attention module, and none came.")
        widths = [_width(head) for head in heads]
        whole(final_output_dim, "final_output_dim", least=1)
        self.module_list = nn.ModuleList(heads)
        self.linear = nn.Linear(sum(widths), final_output_dim)

    def forward(self, *inputs: Tensor, mask: Mask | None = None) -> Tensor:
        """The inputs of the modules (x `[N, L, …]`, or x and y) → `[N, L, final_output_dim]`, under a mask.

        Raises what they raise: TypeError, ValueError.
        """
        named = {} if mask is None else {"mask": mask}
        return self.linear(torch.cat([head(*inputs, **named) for head in self.module_list], -1))

    def attend(self, *inputs: Tensor, mask: Mask | None = None) -> tuple[Tensor, list[AttentionMap]]:
        """The output, and the map of each module, `[N, 1, L, S]`.

        Arguments as `forward`, TypeError or ValueError too.
        """
        named = {} if mask is None else {"mask": mask}
        pairs = [head.attend(*inputs, **named) for head in self.module_list]  # type: ignore[operator]
        return self.linear(torch.cat([out for out, _ in pairs], -1)), [amap for _, amap in pairs]


def _width(head: object) -> int:
    """The width of a head's output, read off its linear_v."""
    width = getattr(getattr(head, "linear_v", None), "out_features", None)
    if not isinstance(head, nn.Module) or not isinstance(width, int):
        raise TypeError(
            f"attn_modules must be modules with a linear_v, such as SelfAttention, and {kind(head)} came."
        )
    return width
