"""Textbook presentation 3: single heads, combined by a module; batch first, `[N, L, D]`.

A decoder uses the same modules with a mask: `forward(x, mask=Causal())`.

`attention`, `SelfAttention`, `CrossAttention` and `MultiHeadedAttention` follow section 3.2 of Vaswani et al.
2017 (arXiv:1706.03762).
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
    """Scale embeddings by √d_model and add sinusoidal positions (Vaswani et al. 2017, section 3.5).

    PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i + 1) = cos(the same angle). A common variant
    differs from the paper: entry n has the exponent 2n/d_model, so the sine in entry 2i and the cosine in
    entry 2i + 1 have different angles.

    Args:
        d_model: The model size, an even number.
        max_seq_len: The largest number of positions.

    Attributes:
        pe: The encodings `[1, max_seq_len, d_model]`, a buffer, which isn't trained.

    Raises:
        TypeError: If a size isn't an integer.
        ValueError: If a size is too small, or d_model is odd.
    """

    pe: Tensor

    def __init__(self, d_model: int, max_seq_len: int = 80) -> None:
        super().__init__()
        whole(d_model, "d_model", least=2)
        whole(max_seq_len, "max_seq_len", least=1)
        if d_model % 2:
            raise ValueError(
                f"Expected d_model to be even, as each angle has a sine and a cosine, got {d_model}. Use "
                f"{d_model + 1}."
            )
        self.d_model = d_model
        positions = torch.arange(max_seq_len)
        self.register_buffer("pe", Sinusoidal(d_model).encode(positions)[None])  # [1, max, d]

    def forward(self, x: Tensor) -> Tensor:
        """Scale embeddings and add the positions.

        Args:
            x: The embeddings `[N, L, d_model]`.

        Returns:
            x · √d_model + pe `[N, L, d_model]`, in the dtype of x.

        Raises:
            TypeError: If x isn't a tensor of floats.
            ValueError: If x has the wrong shape, or is longer than max_seq_len.
        """
        check(x, "x", "N", "L", self.d_model)
        length, longest = x.shape[1], self.pe.shape[1]
        if length > longest:
            raise ValueError(
                f"Expected at most max_seq_len = {longest} positions, got x {sizes(x)}. Use "
                f"PositionalEncoder({self.d_model}, max_seq_len={length})."
            )
        return x * math.sqrt(self.d_model) + self.pe[:, :length].to(x.dtype)  # [N, L, d]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> tuple[Tensor, Tensor]:
    """Return the output of one head, softmax(q kᵀ / √d_k) v, and its weights.

    Args:
        q: The queries `[N, L, d_k]`.
        k: The keys `[N, S, d_k]`.
        v: The values `[N, S, d_v]`.
        mask: A `Mask`, such as `Causal()`, or None.

    Returns:
        The output `[N, L, d_v]` and the weights `[N, L, S]`.

    Raises:
        TypeError: If an input isn't a tensor of floats, or the mask isn't a `Mask`.
        ValueError: If shapes don't fit each other.
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
            f"Expected q and k to have the same width d_k, got {q.shape[2]} in q {sizes(q)} and "
            f"{k.shape[2]} in k {sizes(k)}. Project them to the same width."
        )
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"Expected the same N in q, k and v, and the same length in k and v, got q {sizes(q)}, k "
            f"{sizes(k)}, v {sizes(v)}."
        )


class CrossAttention(nn.Module):
    """One attention head whose queries are projected from x, and keys and values from y.

    Args:
        x_input_dim: The width of x.
        y_input_dim: The width of y.
        key_dim: The width of queries and keys.
        output_dim: The width of values and of the output.

    Raises:
        TypeError: If a size isn't an integer.
        ValueError: If a size is less than 1.
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
        """Attend from x to y.

        Args:
            x: The input from which queries are projected, `[N, L, x_input_dim]`.
            y: The input from which keys and values are projected, `[N, S, y_input_dim]`.
            mask: A `Mask`, such as `Causal()`, or None.

        Returns:
            The output `[N, L, output_dim]`.

        Raises:
            TypeError: If an input isn't a tensor of floats, or the mask isn't a `Mask`.
            ValueError: If shapes don't fit each other.
        """
        return functional.attention(*self._heads(x, y), mask=mask).squeeze(1)

    def attend(self, x: Tensor, y: Tensor, mask: Mask | None = None) -> tuple[Tensor, AttentionMap]:
        """Return the output and its map `[N, 1, L, S]`. Arguments and errors are those of `forward`."""
        out, amap = functional.attention_with_map(*self._heads(x, y), mask=mask)
        return out.squeeze(1), amap

    def _heads(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check(x, "x", "N", "L", self.linear_q.in_features)
        check(y, "y", "N", "S", self.linear_k.in_features)
        if x.shape[0] != y.shape[0]:
            raise ValueError(f"Expected the same N in x and y, got x {sizes(x)} and y {sizes(y)}.")
        q, k, v = self.linear_q(x), self.linear_k(y), self.linear_v(y)
        return q[:, None], k[:, None], v[:, None]  # [N, 1, L, d_k], [N, 1, S, d_k], [N, 1, S, d_v]


class SelfAttention(CrossAttention):
    """One attention head whose queries, keys and values are projected from the same input.

    Without a mask, it is permutation equivariant: permuting the input permutes the output in the same way.

    Args:
        input_dim: The width of x.
        key_dim: The width of queries and keys.
        output_dim: The width of values and of the output.

    Raises:
        TypeError: If a size isn't an integer.
        ValueError: If a size is less than 1.
    """

    def __init__(self, input_dim: int, key_dim: int, output_dim: int) -> None:
        whole(input_dim, "input_dim", least=1)
        super().__init__(input_dim, input_dim, key_dim, output_dim)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:  # type: ignore[override]
        """Return the output `[N, L, output_dim]` for x `[N, L, input_dim]` and an optional mask."""
        return super().forward(x, x, mask)

    def attend(  # type: ignore[override]
        self, x: Tensor, mask: Mask | None = None
    ) -> tuple[Tensor, AttentionMap]:
        """Return the output and its map `[N, 1, L, L]`. Arguments and errors are those of `forward`."""
        return super().attend(x, x, mask)


class MultiHeadedAttention(nn.Module):
    """Several heads whose outputs are concatenated and projected.

    Args:
        attn_modules: `SelfAttention` or `CrossAttention` modules, or others whose `linear_v.out_features` is
            the width of their output.
        final_output_dim: The width of the output.

    Raises:
        TypeError: If a module has no `linear_v`, or the width isn't an integer.
        ValueError: If there are no modules, or the width is less than 1.
    """

    def __init__(self, attn_modules: Iterable[nn.Module], final_output_dim: int) -> None:
        super().__init__()
        heads = list(attn_modules)
        if not heads:
            raise ValueError("Expected at least one module in attn_modules, got none.")
        widths = [_width(head) for head in heads]
        whole(final_output_dim, "final_output_dim", least=1)
        self.module_list = nn.ModuleList(heads)
        self.linear = nn.Linear(sum(widths), final_output_dim)

    def forward(self, *inputs: Tensor, mask: Mask | None = None) -> Tensor:
        """Call every module, concatenate the outputs and project them. Errors are those of the modules.

        Args:
            *inputs: The inputs of each module: x `[N, L, …]`, or x and y.
            mask: A `Mask`, such as `Causal()`, or None.

        Returns:
            The output `[N, L, final_output_dim]`.
        """
        options = {} if mask is None else {"mask": mask}
        return self.linear(torch.cat([head(*inputs, **options) for head in self.module_list], -1))

    def attend(self, *inputs: Tensor, mask: Mask | None = None) -> tuple[Tensor, list[AttentionMap]]:
        """Return the output and the map `[N, 1, L, S]` of each module. Arguments are those of `forward`."""
        options = {} if mask is None else {"mask": mask}
        pairs = [head.attend(*inputs, **options) for head in self.module_list]  # type: ignore[operator]
        return self.linear(torch.cat([out for out, _ in pairs], -1)), [amap for _, amap in pairs]


def _width(head: object) -> int:
    """Return the width of a head's output, or raise TypeError if it has no `linear_v`."""
    width = getattr(getattr(head, "linear_v", None), "out_features", None)
    if not isinstance(head, nn.Module) or not isinstance(width, int):
        raise TypeError(
            f"Expected modules with a linear_v, such as SelfAttention, in attn_modules, got {kind(head)}."
        )
    return width
