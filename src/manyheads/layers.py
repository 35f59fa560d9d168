"""Attention layers, batch first: a single head, self or cross attention, and multi-head attention.

A position encoding, a bias of the scores and a norm of q and k are given to a layer as objects. `forward`
returns the output, `attend` the output and its `AttentionMap`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from manyheads import kernels
from manyheads.biases import Bias
from manyheads.cache import Cache
from manyheads.functional import attention, attention_with_map
from manyheads.layouts import LayerSizes, merge_heads, read_weights, split_heads, write_weights
from manyheads.maps import AttentionMap
from manyheads.masks import Mask
from manyheads.positions import Rotary
from manyheads.shapes import check_dense, divide, kind, real, sizes, whole

Inputs = tuple[Tensor, Tensor, Tensor, dict[str, Any]]  # q, k, v and other arguments of `attention`


class CrossAttention(nn.Module):
    """One head with queries from x, and keys and values from a context (Vaswani et al. 2017, section 3.2.3).

    Args:
        embed: The width e of x.
        context_dim: The width c of the context, e if None.
        head_dim: The width d of the head and of the output, e if None.
        projection_bias: Give the projections `q`, `k` and `v` a bias.
        kernel: The kernel, as `attention` takes it.

    Raises:
        TypeError: If a size isn't an integer, or projection_bias isn't a boolean.
        ValueError: If a size is less than 1, or the kernel is unknown.
    """

    def __init__(
        self,
        embed: int,
        context_dim: int | None = None,
        head_dim: int | None = None,
        *,
        projection_bias: bool = True,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        whole(embed, "embed", least=1)
        c = embed if context_dim is None else whole(context_dim, "context_dim", least=1)
        d = embed if head_dim is None else whole(head_dim, "head_dim", least=1)
        _check_projection_bias(projection_bias)
        self.kernel = kernels.check(kernel)
        self.q = nn.Linear(embed, d, projection_bias)
        self.k = nn.Linear(c, d, projection_bias)
        self.v = nn.Linear(c, d, projection_bias)

    def forward(self, x: Tensor, context: Tensor, *, mask: Mask | None = None) -> Tensor:
        """Attend from x to the context.

        Args:
            x: The input of the queries `[b, t, e]`.
            context: The input of keys and values `[b, s, c]`.
            mask: The mask.

        Returns:
            The output `[b, t, d]`.

        Raises:
            TypeError: If an input isn't a dense tensor, or the mask isn't a `Mask`.
            ValueError: If shapes don't fit each other.
        """
        return attention(*self._heads(x, context), mask=mask, kernel=self.kernel).squeeze(1)

    def attend(self, x: Tensor, context: Tensor, *, mask: Mask | None = None) -> tuple[Tensor, AttentionMap]:
        """Return the output and its map `[b, 1, t, s]`. Arguments and errors are those of `forward`."""
        out, amap = attention_with_map(*self._heads(x, context), mask=mask, kernel=self.kernel)
        return out.squeeze(1), amap

    def _heads(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _check_input(x, self.q.in_features, "x", "t")
        _check_input(context, self.k.in_features, "context", "s")
        q, k, v = self.q(x), self.k(context), self.v(context)
        return q[:, None], k[:, None], v[:, None]  # [b, 1, t, d], [b, 1, s, d], [b, 1, s, d]

    def extra_repr(self) -> str:
        """Return the options that `repr` shows."""
        return _kernel_repr(self.kernel).removeprefix(", ")


class SelfAttention(CrossAttention):
    """One head over its own input: softmax(q kᵀ / √d) v (Vaswani et al. 2017, section 3.2.1).

    Args:
        embed: The width e of x.
        head_dim: The width d of the head and of the output, e if None.
        projection_bias: Give the projections `q`, `k` and `v` a bias.
        kernel: The kernel, as `attention` takes it.

    Raises:
        TypeError: If a size isn't an integer, or projection_bias isn't a boolean.
        ValueError: If a size is less than 1, or the kernel is unknown.
    """

    def __init__(
        self,
        embed: int,
        head_dim: int | None = None,
        *,
        projection_bias: bool = True,
        kernel: str = "auto",
    ) -> None:
        super().__init__(embed, embed, head_dim, projection_bias=projection_bias, kernel=kernel)

    def forward(self, x: Tensor, *, mask: Mask | None = None) -> Tensor:  # type: ignore[override]
        """Return the output `[b, t, d]` for x `[b, t, e]`. Errors are those of `CrossAttention.forward`."""
        return super().forward(x, x, mask=mask)

    def attend(  # type: ignore[override]
        self, x: Tensor, *, mask: Mask | None = None
    ) -> tuple[Tensor, AttentionMap]:
        """Return the output and its map `[b, 1, t, t]`. Arguments and errors are those of `forward`."""
        return super().attend(x, x, mask=mask)


class MultiHeadAttention(nn.Module):
    """Multi-head attention over x or a context (Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2).

    Args:
        embed: The model size e of x and of the output.
        heads: The number of query heads h.
        kv_heads: The number of key/value heads g, a divisor of h (grouped-query attention, Ainslie et al.
            2023, arXiv:2305.13245); h if None.
        head_dim: The size d of a head, e / h if None.
        context_dim: The width c of the context, e if None.
        position: `Rotary(...)`, which rotates q and k by their positions.
        bias: `ALiBi(...)`, `Relative.learned(...)` or `Dense(...)`, added to the scores. Its parameters
            become parameters of the layer.
        qk_norm: The norm of q and k over d, applied before `position` (Henry et al. 2020, arXiv:2010.04245):
            a function of d that returns a module (`torch.nn.RMSNorm`), or a module, which is copied for k.
        dropout: The dropout probability of weights, in training.
        projection_bias: Give the projections `q`, `k`, `v` and `o` a bias (False in Llama).
        kernel: The kernel, as `attention` takes it.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If sizes are less than 1 or don't fit each other, dropout isn't a probability, or the
            kernel is unknown.
    """

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        position: Rotary | None = None,
        bias: Bias | None = None,
        qk_norm: Callable[[int], nn.Module] | nn.Module | None = None,
        dropout: float = 0.0,
        projection_bias: bool = True,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        e, h = whole(embed, "embed", least=1), whole(heads, "heads", least=1)
        g = h if kv_heads is None else whole(kv_heads, "kv_heads", least=1)
        divide(h, g, "heads", "kv_heads")
        d = divide(e, h, "embed", "heads") if head_dim is None else whole(head_dim, "head_dim", least=1)
        c = e if context_dim is None else whole(context_dim, "context_dim", least=1)
        if position is not None and not isinstance(position, Rotary):
            raise TypeError(
                f"Expected position to be Rotary, got {kind(position)}. An encoding such as Sinusoidal is "
                "added to the embeddings before the layer."
            )
        if position is not None and position.dim > d:
            raise ValueError(f"Expected position to rotate at most d = {d} entries, got dim={position.dim}.")
        if isinstance(bias, bool):
            raise TypeError(
                f"Expected bias to be ALiBi, Relative or Dense, which are added to the scores, got {bias}. "
                f"For a bias of the projections use projection_bias={bias}."
            )
        if bias is not None and not isinstance(bias, Bias):
            raise TypeError(f"Expected bias to be ALiBi, Relative or Dense, got {kind(bias)}.")
        dropout = real(dropout, "dropout", lambda p: 0 <= p <= 1, "a number between 0 and 1")
        _check_projection_bias(projection_bias)
        self.kernel = kernels.check(kernel)
        self.embed, self.heads, self.kv_heads, self.head_dim, self.context_dim = e, h, g, d, c
        self.projection_bias = projection_bias
        self.q = nn.Linear(e, h * d, projection_bias)
        self.k = nn.Linear(c, g * d, projection_bias)
        self.v = nn.Linear(c, g * d, projection_bias)
        self.o = nn.Linear(h * d, e, projection_bias)
        self.position = position
        self.bias = None if bias is None else LearnedBias(bias)
        self.q_norm, self.k_norm = _norms(qk_norm, d)
        self.dropout = dropout

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Attend from x to itself, or to a context.

        Args:
            x: The input `[b, t, e]`. With a cache, it continues the tokens in the cache.
            context: The input of keys and values `[b, s, c]`, x if None.
            mask: The mask.
            cache: The cache of this layer. Its mask, causal by default, is combined with `mask`.

        Returns:
            The output `[b, t, e]`.

        Raises:
            TypeError: If an input isn't a dense tensor, the mask isn't a `Mask` or the cache not a `Cache`.
            ValueError: If shapes don't fit each other, both context and cache are given, or the cache is
                full.
        """
        if isinstance(cache, Cache) and cache.votes is not None:
            return self.attend(x, context, mask=mask, cache=cache)[0]  # votes are read from the map
        q, k, v, options = self._inputs(x, context, mask, cache)
        return self._merge(attention(q, k, v, **options), cache, q.shape[2])

    def attend(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, AttentionMap]:
        """Return the output and its map `[b, h, t, s]`, per head and before dropout.

        Arguments and errors are those of `forward`.
        """
        q, k, v, options = self._inputs(x, context, mask, cache)
        votes = cache is not None and cache.votes is not None
        statistics = {"received": ()} if votes and q.shape[2] == 1 else None
        out, amap = attention_with_map(q, k, v, **options, statistics=statistics)
        offset = 0 if cache is None else cache.offset
        out = self._merge(out, cache, q.shape[2])
        if cache is not None and votes:
            try:
                cache.vote(amap)
            except BaseException:
                cache.offset = offset  # undo the step that failed
                raise
        return out, amap

    def _inputs(self, x: Tensor, context: Tensor | None, mask: Mask | None, cache: Cache | None) -> Inputs:
        _check_input(x, self.embed, "x", "t")
        if context is None and self.context_dim != self.embed:
            raise ValueError(f"Expected a context [b, s, {self.context_dim}] for this layer, got none.")
        if context is not None and cache is not None:
            raise ValueError("Expected a context or a cache, got both. A cache has the keys of x itself.")
        if cache is not None and not isinstance(cache, Cache):
            raise TypeError(f"Expected cache to be a Cache, got {kind(cache)}.")
        source = x if context is None else context
        _check_input(source, self.context_dim, "context", "s")
        q = self.q_norm(split_heads(self.q(x), self.heads))  # [b, h, t, d]
        k = self.k_norm(split_heads(self.k(source), self.kv_heads))  # [b, g, s, d]
        v = split_heads(self.v(source), self.kv_heads)  # [b, g, s, d]
        t, s = q.shape[2], k.shape[2]
        first = 0 if cache is None else cache.offset  # the position of the first new key
        offset = s - t if cache is None else first
        if self.position is not None:
            q = self.position(q, torch.arange(t, device=q.device) + offset)
            k = self.position(k, torch.arange(s, device=k.device) + first)
        if cache is not None:
            mask = cache.mask if mask is None else cache.mask & mask
            k, v = cache.write(k, v)  # [b, g, len(cache) + t, d]
        bias = None if self.bias is None else self.bias.value()
        if cache is not None:
            assert mask is not None
            mask = cache.place(mask, self.heads, t)
            bias = None if bias is None else cache.place(bias, self.heads, t)
        options = {"mask": mask, "bias": bias, "offset": offset, "kernel": self.kernel}
        options["dropout_p"] = self.dropout if self.training else 0.0
        return q, k, v, options

    def _merge(self, out: Tensor, cache: Cache | None, new: int) -> Tensor:
        if cache is not None:  # the new keys count only after attention has succeeded
            cache.offset += new
        return self.o(merge_heads(out))  # [b, t, e]

    def extra_repr(self) -> str:
        """Return the sizes and options that `repr` shows."""
        groups = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        position = f", position={self.position}" if self.position is not None else ""
        biases = "" if self.projection_bias else ", projection_bias=False"
        return (
            f"embed={self.embed}, heads={self.heads}{groups}, head_dim={self.head_dim}{position}{biases}"
            f"{_kernel_repr(self.kernel)}"
        )

    def load(self, tensors: Mapping[str, Tensor], layout: str = "separate") -> MultiHeadAttention:
        """Copy weights into the layer.

        Args:
            tensors: Linear weights `[out, in]` and biases `[out]` by their names. Absent biases become zero.
            layout: The names. "separate" is `q.weight` `[h·d, e]`, `q.bias`, the same for k and v
                (`[g·d, c]`) and o (`[e, h·d]`). "packed" is `qkv.weight` (the rows of q, k and v, in this
                order), `qkv.bias`, `o.weight` and `o.bias`. "torch" is the state dict of
                `torch.nn.MultiheadAttention`. "heads" is a list of single heads, `heads.0.q.weight`
                `[d, e]`, …, and `o.weight` and `o.bias`.

        Returns:
            The layer.

        Raises:
            TypeError: If a value isn't a tensor.
            ValueError: If a tensor is missing, unknown or has the wrong shape. The layer doesn't change.
        """
        if not isinstance(tensors, Mapping):
            raise TypeError(f"Expected a state dict, tensors by their names, got {kind(tensors)}.")
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                raise TypeError(
                    f"Expected {name} to be a tensor of one or two dimensions, got {kind(tensor)}."
                )
        biases = [name for name in tensors if name.endswith("bias")]
        if biases and not self.projection_bias:
            raise ValueError(
                f"Expected weights without biases for a layer with projection_bias=False, got "
                f"{', '.join(biases)}. Make the layer with projection_bias=True, or leave the biases out."
            )
        separate, state = read_weights(tensors, layout, self._sizes()), self._projections()
        for name, tensor in separate.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"Expected {name} to be {sizes(state[name])} in this layer, got {sizes(tensor)}."
                )
        with torch.no_grad():
            for name, parameter in state.items():
                parameter.copy_(separate[name]) if name in separate else parameter.zero_()
        return self

    def export(self, layout: str = "separate") -> dict[str, Tensor]:
        """Return detached copies of the weights, named and shaped as `load` describes for a layout.

        Args:
            layout: "separate", "packed", "torch" or "heads".

        Returns:
            The weights by their names.

        Raises:
            ValueError: If the layout is unknown, or this layer doesn't have it.
        """
        detached = {name: parameter.detach() for name, parameter in self._projections().items()}
        return write_weights(detached, layout, self._sizes())

    def _sizes(self) -> LayerSizes:
        return LayerSizes(self.heads, self.kv_heads, self.head_dim, self.embed, self.context_dim)

    def _projections(self) -> dict[str, nn.Parameter]:
        """Return the weights and biases of q, k, v and o by their names."""
        layers = {"q": self.q, "k": self.k, "v": self.v, "o": self.o}
        return {f"{part}.{name}": x for part, layer in layers.items() for name, x in layer.named_parameters()}


class LearnedBias(nn.Module):
    """A bias as a module, so that its tensors are moved, trained and saved with the layer."""

    def __init__(self, bias: Bias) -> None:
        super().__init__()
        self._bias = bias
        for name in bias.names:
            tensor = getattr(bias, name)
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            elif isinstance(tensor, Tensor):
                self.register_buffer(name, tensor)

    def value(self) -> Bias:
        """Return the bias with the current tensors of the module."""
        return self._bias.but(**self._parameters, **self._buffers)


def _norms(qk_norm: Callable[[int], nn.Module] | nn.Module | None, d: int) -> tuple[nn.Module, nn.Module]:
    if qk_norm is None:
        return nn.Identity(), nn.Identity()
    if isinstance(qk_norm, nn.Module):
        return qk_norm, deepcopy(qk_norm)
    if not callable(qk_norm):
        raise TypeError(
            f"Expected qk_norm to be a module or a function of d that returns one, got {kind(qk_norm)}."
        )
    return qk_norm(d), qk_norm(d)


def _check_projection_bias(value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(
            f"Expected projection_bias to be True or False, got {value!r}. For a bias of the scores use "
            "MultiHeadAttention's bias=."
        )


def _kernel_repr(kernel: str) -> str:
    return "" if kernel == "auto" else f", kernel={kernel!r}"


def _check_input(x: Any, width: int, name: str, length: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"Expected {name} to be a tensor [b, {length}, {width}], got {kind(x)}.")
    check_dense(x, name, f"[b, {length}, {width}]")
    if x.dim() != 3 or x.shape[-1] != width:
        raise ValueError(f"Expected {name} to be [b, {length}, {width}], batch first, got {sizes(x)}.")
