"""Attention as modules, batch first: one head over itself or over a context, and many heads.

Parts are injected, not flagged: a position (`Rotary`), a bias (`ALiBi`, `Relative`), a norm for q and
k. `forward` returns the output, `attend` the output and its `AttentionMap`.
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
from manyheads.maps import AttentionMap
from manyheads.masks import Mask
from manyheads.positions import Rotary
from manyheads.shapes import check_dense, divide, kind, real, sizes, whole

Inputs = tuple[Tensor, Tensor, Tensor, dict[str, Any]]  # q, k, v and the rest of attention's arguments


class SelfAttention(nn.Module):
    """One head over its own input: softmax(q kᵀ / √d) v (Vaswani et al. 2017, section 3.2.1).

    embed: the input's width e; head_dim: the head's and the output's width d (e if None). TypeError or
    ValueError unless they are at least 1. projection_bias: whether q, k and v have a bias. kernel: "auto" or
    a kernel's name, as `attention` takes it.
    """

    def __init__(
        self,
        embed: int,
        head_dim: int | None = None,
        *,
        projection_bias: bool = True,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        self._build(embed, embed, head_dim, projection_bias, kernel)

    def _build(
        self, embed: int, context_dim: int, head_dim: int | None, projection_bias: bool, kernel: str
    ) -> None:
        whole(embed, "embed", least=1)
        whole(context_dim, "context_dim", least=1)
        d = embed if head_dim is None else whole(head_dim, "head_dim", least=1)
        _check_projection_bias(projection_bias)
        self.kernel = kernels.check(kernel)
        self.q = nn.Linear(embed, d, projection_bias)
        self.k = nn.Linear(context_dim, d, projection_bias)
        self.v = nn.Linear(context_dim, d, projection_bias)

    def forward(self, x: Tensor, *, mask: Mask | None = None) -> Tensor:
        """Map x `[b, t, e]` → `[b, t, d]`, under the mask; TypeError or ValueError for another x or mask."""
        return attention(*self._heads(x, x), mask=mask, kernel=self.kernel).squeeze(1)

    def attend(self, x: Tensor, *, mask: Mask | None = None) -> tuple[Tensor, AttentionMap]:
        """Return the output and its map, `[b, 1, t, t]`; as `forward` (TypeError, ValueError)."""
        out, amap = attention_with_map(*self._heads(x, x), mask=mask, kernel=self.kernel)
        return out.squeeze(1), amap

    def _heads(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _check_input(x, self.q.in_features, "x", "t")
        _check_input(context, self.k.in_features, "context", "s")
        return (
            self.q(x)[:, None],
            self.k(context)[:, None],
            self.v(context)[:, None],
        )  # [b, 1, t, d]

    def extra_repr(self) -> str:
        return _kernel_repr(self.kernel).removeprefix(", ")


class CrossAttention(SelfAttention):
    """One head that asks with x and finds keys and values in a context.

    The decoder's way to the encoder (Vaswani et al. 2017, section 3.2.3). embed: the width of x;
    context_dim: that of the context (embed if None); head_dim: d (embed if None). TypeError or ValueError
    unless they are at least 1. projection_bias and kernel as in `SelfAttention`.
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
        nn.Module.__init__(self)
        context_dim = embed if context_dim is None else context_dim
        self._build(embed, context_dim, head_dim, projection_bias, kernel)

    def forward(self, x: Tensor, context: Tensor, *, mask: Mask | None = None) -> Tensor:  # type: ignore[override]
        """Map x `[b, t, e]`, context `[b, s, c]` → `[b, t, d]`, under the mask.

        TypeError or ValueError for others.
        """
        return attention(*self._heads(x, context), mask=mask, kernel=self.kernel).squeeze(1)

    def attend(  # type: ignore[override]
        self, x: Tensor, context: Tensor, *, mask: Mask | None = None
    ) -> tuple[Tensor, AttentionMap]:
        """Return the output and its map, `[b, 1, t, s]`; as `forward` (TypeError, ValueError)."""
        out, amap = attention_with_map(*self._heads(x, context), mask=mask, kernel=self.kernel)
        return out.squeeze(1), amap


class MultiHeadAttention(nn.Module):
    """Many heads over x, or over a context (Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2).

    Args:
        embed: the model size e of x and of the output.
        heads: the number of query heads h.
        kv_heads: key/value heads g, which divide h (grouped-query attention, Ainslie et al. 2023,
            arXiv:2305.13245); h if None.
        head_dim: the size d of a head; e / h if None.
        context_dim: the width of the context, if it isn't e.
        position: `Rotary(...)`: turns q and k; a query's position is its row plus the offset.
        bias: `ALiBi(...)`, `Relative.learned(...)`, …: added to the scores; its parameters are the
            layer's.
        qk_norm: what normalises q and k over d before the position: a function of d that makes a
            module (`torch.nn.RMSNorm`), or a module, which is copied for each (Henry et al. 2020,
            arXiv:2010.04245).
        dropout: the probability with which weights are dropped in training.
        projection_bias: whether q, k, v and o have a bias (False in Llama). `bias` is another one, added to
            the scores.
        kernel: "auto" or a kernel's name, as `attention` takes it.

    The projections are `q`, `k`, `v` and `o`. TypeError or ValueError for sizes that don't go together
    and parts of another kind.
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
                f"Expected position to rotate q and k, as Rotary does, got {kind(position)}"
                ": an encoding such as Sinusoidal is added to the embeddings before the layer."
            )
        if position is not None and position.dim > d:
            raise ValueError(f"position turns {position.dim} entries of a head, and the head size d is {d}.")
        if isinstance(bias, bool):
            raise TypeError(
                f"Expected bias to be ALiBi, Relative or Dense, which are added to the scores, got {bias}. "
                f"Whether the projections have a bias is projection_bias={bias}."
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
        self.bias = None if bias is None else Held(bias)
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
        """Map x `[b, t, e]`, and a context `[b, s, c]` to attend to instead of x → `[b, t, e]`.

        With a cache, x is what comes after what the cache holds, which is looked at too, under the
        cache's mask (causal unless it was made otherwise) and `mask`.

        Raises TypeError or ValueError for inputs of another shape, and as `attention` and `Cache` do.
        """
        q, k, v, rest = self._inputs(x, context, mask, cache)
        if cache is not None and cache.votes:
            return self._voted(q, k, v, cache, rest)[0]
        return self._merge(attention(q, k, v, **rest), cache, k)

    def attend(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, AttentionMap]:
        """`forward`, and beside its output the map `[b, h, t, s]` (per head, before dropout).

        Arguments as `forward`, and it raises what that raises: TypeError, ValueError.
        """
        q, k, v, rest = self._inputs(x, context, mask, cache)
        if cache is not None and cache.votes:
            return self._voted(q, k, v, cache, rest)
        out, amap = attention_with_map(q, k, v, **rest)
        return self._merge(out, cache, k), amap

    def _voted(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, rest: dict[str, Any]
    ) -> tuple[Tensor, AttentionMap]:
        """Return the output and its map, whose last queries vote in the cache."""
        look = {"received": ()} if q.shape[2] == 1 else None
        out, amap = attention_with_map(q, k, v, **rest, statistics=look)
        before, out = cache.offset, self._merge(out, cache, k)
        try:
            cache.vote(amap)
        except BaseException:
            cache.offset = before  # a step that fails leaves the cache as it was
            raise
        return out, amap

    def _inputs(self, x: Tensor, context: Tensor | None, mask: Mask | None, cache: Cache | None) -> Inputs:
        _check_input(x, self.embed, "x", "t")
        if context is None and self.context_dim != self.embed:
            raise ValueError(f"Expected a context [b, s, {self.context_dim}] for this layer, got none.")
        if context is not None and cache is not None:
            raise ValueError("Expected a context or a cache, got both: a cache holds the keys of x itself.")
        if cache is not None and not isinstance(cache, Cache):
            raise TypeError(f"Expected cache to be a Cache, got {kind(cache)}.")
        source = x if context is None else context
        _check_input(source, self.context_dim, "context", "s")
        q = self._split(self.q(x), self.heads)  # [b, h, t, d]
        k = self._split(self.k(source), self.kv_heads)  # [b, g, s, d]
        v = self._split(self.v(source), self.kv_heads)  # [b, g, s, d]
        q, k = self.q_norm(q), self.k_norm(k)
        t, s = q.shape[2], k.shape[2]
        first = 0 if cache is None else cache.offset  # the position of the first new key
        offset = s - t if cache is None else first
        if self.position is not None:
            q = self.position(q, torch.arange(t, device=q.device) + offset)
            k = self.position(k, torch.arange(s, device=k.device) + first)
        if cache is not None:
            mask = cache.mask if mask is None else cache.mask & mask
            k, v = cache.write(k, v)  # [b, g, first + t, d]
        bias = None if self.bias is None else self.bias.value()
        dropout_p = self.dropout if self.training else 0.0
        rest = {"mask": mask, "bias": bias, "offset": offset, "dropout_p": dropout_p, "kernel": self.kernel}
        return q, k, v, rest

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)  # [b, h, t, d]

    def _merge(self, out: Tensor, cache: Cache | None, k: Tensor) -> Tensor:
        if cache is not None:  # only now that attention has taken the new keys
            cache.offset = k.shape[2]
        return self.o(out.transpose(1, 2).flatten(2))  # [b, t, e]

    def extra_repr(self) -> str:
        groups = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        position = f", position={self.position}" if self.position is not None else ""
        biases = "" if self.projection_bias else ", projection_bias=False"
        return (
            f"embed={self.embed}, heads={self.heads}{groups}, head_dim={self.head_dim}{position}{biases}"
            f"{_kernel_repr(self.kernel)}"
        )

    # -- weights in the shapes that others keep them ------------------------------------------------

    def load(self, tensors: Mapping[str, Tensor], layout: str = "separate") -> MultiHeadAttention:
        """Copy weights in; returns the layer.

        tensors: by their names, linear weights `[out, in]`, an absent bias is zero; no biases for a layer
            with projection_bias=False.
        layout: "separate": `q.weight` `[h·d, e]`, `q.bias`, the same for k, v (`[g·d, c]`) and o
            (`[e, h·d]`); "packed": `qkv.weight` (the rows of q, k, v in this order), `qkv.bias`,
            `o.…`; "torch": the state dict of `torch.nn.MultiheadAttention`; "heads": a list of single
            heads, `heads.0.q.weight` `[d, e]`, …, and `o.…`.

        Raises ValueError naming what is missing, left over, or of another shape; TypeError for what is no
        tensor.
        """
        if not isinstance(tensors, Mapping):
            raise TypeError(f"Expected a state dict for load, tensors by their names, got {kind(tensors)}.")
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                raise TypeError(f"load takes tensors of one or two dimensions, and {name} is {kind(tensor)}.")
        own = dict(_layout(layout).read(self, dict(tensors)))
        state = self._projections()
        biases = [name for name in tensors if name.endswith("bias")]
        if biases and not self.projection_bias:
            raise ValueError(
                f"Expected weights without biases for a layer with projection_bias=False, got "
                f"{', '.join(biases)}. Make the layer with projection_bias=True, or leave the biases out."
            )
        unknown, missing = (
            sorted(own.keys() - state.keys()),
            sorted(set(_SEPARATE[::2]) - own.keys()),
        )
        if unknown or missing:
            what = f"got {', '.join(unknown)}" if unknown else f"{', '.join(missing)} is missing"
            raise ValueError(f"layout {layout!r} holds {_layout(layout).names}, and {what}.")
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"Expected {name} to be {sizes(state[name])} in this layer, got {sizes(tensor)}."
                )
        with torch.no_grad():
            for name, parameter in state.items():
                parameter.copy_(own[name]) if name in own else parameter.zero_()
        return self

    def export(self, layout: str = "separate") -> dict[str, Tensor]:
        """Return detached copies of the weights in one of the layouts that `load` reads.

        Shapes are those of `load` (`q.weight` `[h·d, e]`, …). ValueError where this layer has no such layout.
        """
        chosen = _layout(layout)
        return chosen.write(self, {name: x.detach().clone() for name, x in self._projections().items()})

    def _projections(self) -> dict[str, nn.Parameter]:
        """Return the weights and biases of q, k, v and o by their names in "separate"."""
        named = {name: getattr(getattr(self, name[0]), name[2:]) for name in _SEPARATE}
        return {name: parameter for name, parameter in named.items() if parameter is not None}


class Held(nn.Module):
    """A bias inside a module: its tensors move, train and save with the layer."""

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
        """Return the bias, on the layer's own tensors."""
        own = {**self._parameters, **self._buffers}
        return self._bias.but(**own)


def _norms(qk_norm: Callable[[int], nn.Module] | nn.Module | None, d: int) -> tuple[nn.Module, nn.Module]:
    if qk_norm is None:
        return nn.Identity(), nn.Identity()
    if isinstance(qk_norm, nn.Module):
        return qk_norm, deepcopy(qk_norm)
    if not callable(qk_norm):
        raise TypeError(
            f"Expected qk_norm to be a module or a function of d that makes one, got {kind(qk_norm)}."
        )
    return qk_norm(d), qk_norm(d)


def _check_projection_bias(value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(
            f"Expected projection_bias to be True or False, got {value!r}. A bias for the scores is "
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


# -- layouts -----------------------------------------------------------------------------------------

_SEPARATE = tuple(f"{part}.{kind_}" for part in "qkvo" for kind_ in ("weight", "bias"))

Weights = dict[str, Tensor]


class _Layout:
    """How weights are named and packed elsewhere: read to "separate", and written from it."""

    names = "q.weight, q.bias and the same for k, v, o"

    def read(self, layer: MultiHeadAttention, tensors: Weights) -> Weights:
        return tensors

    def write(self, layer: MultiHeadAttention, own: Weights) -> Weights:
        return own


class _Packed(_Layout):
    names = "qkv.weight, qkv.bias, o.weight, o.bias"

    def read(self, layer: MultiHeadAttention, tensors: Weights) -> Weights:
        return _unpack(layer, tensors, {"qkv.weight": "weight", "qkv.bias": "bias"})

    def write(self, layer: MultiHeadAttention, own: Weights) -> Weights:
        _one_source(layer, "packed")
        return _pack(own, {"qkv.weight": "weight", "qkv.bias": "bias"})


class _Torch(_Layout):
    names = (
        "in_proj_weight (or q_proj_weight, k_proj_weight, v_proj_weight), in_proj_bias, "
        "out_proj.weight, out_proj.bias"
    )
    packed: Mapping[str, str] = {"in_proj_weight": "weight", "in_proj_bias": "bias"}
    others: Mapping[str, str] = {
        "q_proj_weight": "q.weight",
        "k_proj_weight": "k.weight",
        "v_proj_weight": "v.weight",
        "out_proj.weight": "o.weight",
        "out_proj.bias": "o.bias",
    }

    def read(self, layer: MultiHeadAttention, tensors: Weights) -> Weights:
        self._same(layer)
        return {self.others.get(n, n): x for n, x in _unpack(layer, tensors, self.packed).items()}

    def write(self, layer: MultiHeadAttention, own: Weights) -> Weights:
        self._same(layer)
        apart = layer.context_dim != layer.embed
        named = _pack(own, {"in_proj_bias": "bias"} if apart else self.packed)
        back = {ours: theirs for theirs, ours in self.others.items()}
        return {back.get(n, n): x for n, x in named.items()}

    def _same(self, layer: MultiHeadAttention) -> None:
        if layer.kv_heads != layer.heads or layer.head_dim * layer.heads != layer.embed:
            raise ValueError(
                'layout "torch" has as many key heads as heads, of size embed / heads, and this layer has '
                f"heads={layer.heads}, kv_heads={layer.kv_heads}, head_dim={layer.head_dim}, "
                f"embed={layer.embed}."
            )


class _Heads(_Layout):
    names = "heads.0.q.weight, heads.0.q.bias, … for q, k, v of each head, and o.weight, o.bias"

    def read(self, layer: MultiHeadAttention, tensors: Weights) -> Weights:
        self._single(layer)
        own = {name: x for name, x in tensors.items() if not name.startswith("heads.")}
        for name in _SEPARATE[:6]:
            single = [tensors.get(f"heads.{n}.{name}") for n in range(layer.heads)]
            found = [x for x in single if x is not None]
            if found and len(found) != layer.heads:
                absent = single.index(None)
                raise ValueError(f"layout 'heads' holds {self.names}, and heads.{absent}.{name} is missing.")
            if found:
                own[name] = torch.cat(found)
        known = {f"heads.{n}.{name}" for n in range(layer.heads) for name in _SEPARATE[:6]}
        return own | {
            name: x for name, x in tensors.items() if name.startswith("heads.") and name not in known
        }

    def write(self, layer: MultiHeadAttention, own: Weights) -> Weights:
        self._single(layer)
        named = {name: own[name] for name in _SEPARATE[6:] if name in own}
        for name in _SEPARATE[:6]:
            for n, part in enumerate(own[name].chunk(layer.heads) if name in own else ()):
                named[f"heads.{n}.{name}"] = part.clone()
        return named

    def _single(self, layer: MultiHeadAttention) -> None:
        if layer.kv_heads != layer.heads:
            raise ValueError(
                'layout "heads" has keys and values for each head, and this layer has '
                f"kv_heads={layer.kv_heads} for heads={layer.heads}."
            )


def _one_source(layer: MultiHeadAttention, layout: str) -> None:
    if layer.context_dim != layer.embed:
        raise ValueError(
            f"layout {layout!r} has one input for q, k and v, and this layer's context_dim="
            f'{layer.context_dim} is not its embed={layer.embed}: use "separate".'
        )


def _unpack(layer: MultiHeadAttention, tensors: Weights, packed: Mapping[str, str]) -> Weights:
    """Split what is packed into the rows of q, k and v."""
    own = {name: x for name, x in tensors.items() if name not in packed}
    h, g, d = layer.heads, layer.kv_heads, layer.head_dim
    for name, what in packed.items():
        if name not in tensors:
            continue
        if what == "weight":
            _one_source(layer, name)
        rows = (h + 2 * g) * d
        if tensors[name].shape[0] != rows:
            raise ValueError(
                f"Expected {name} to have {rows} rows, those of q, k and v, got {sizes(tensors[name])}."
            )
        for part, x in zip("qkv", tensors[name].split([h * d, g * d, g * d]), strict=True):
            own[f"{part}.{what}"] = x
    return own


def _pack(own: Weights, packed: Mapping[str, str]) -> Weights:
    gone = {f"{part}.{what}" for what in packed.values() for part in "qkv"}
    joined = {
        name: torch.cat([own[f"{part}.{what}"] for part in "qkv"])
        for name, what in packed.items()
        if f"q.{what}" in own
    }
    return joined | {name: x for name, x in own.items() if name not in gone}


_LAYOUTS: dict[str, _Layout] = {
    "separate": _Layout(),
    "packed": _Packed(),
    "torch": _Torch(),
    "heads": _Heads(),
}


def _layout(name: str) -> _Layout:
    if name not in _LAYOUTS:
        raise ValueError(f"Expected layout to be one of {', '.join(_LAYOUTS)}, got {name!r}.")
    return _LAYOUTS[name]
