"""Presentation 2: the class that takes the place of `torch.nn.MultiheadAttention`.

    model = replace(nn.TransformerEncoder(…))      # every attention in a model becomes ours
    attention = MultiheadAttention(512, 8)         # or one by one

A boolean mask says True = may NOT attend, as there; a float mask is added to the scores. What differs:

- A query that may see nothing gives zeros (and zero weights), not NaN.
- `attn_mask` counts whatever `is_causal` says: the hint is checked before it is used, and a wrong one
  changes nothing. (There a wrong hint gives one answer with `need_weights` and another without.)
- Our `forward` runs, always: PyTorch's transformer layers, in evaluation without gradients, would
  compute the attention themselves.

Why it subclasses nn.MultiheadAttention: its parameters, their names and the order in which they are
drawn are then that class's own, and `isinstance` (initialisers, adapters, converters) finds it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from manyheads.biases import Dense
from manyheads.classic.common import mix, weigh
from manyheads.functional import attention, attention_with_map
from manyheads.maps import AttentionMap
from manyheads.masks import Causal, Drop, Mask
from manyheads.shapes import can_read, kind, sizes, whole

Inputs = tuple[Tensor, Tensor, Tensor, dict[str, Any]]  # q, k, v and the rest of attention's arguments


class Refused(ValueError, AssertionError, RuntimeError):
    """What can't be computed as asked, in one sentence.

    PyTorch's class raises AssertionError for some of it and RuntimeError for the rest: code that
    catches one of them goes on working.
    """


class MultiheadAttention(nn.MultiheadAttention):
    """Takes the place of `torch.nn.MultiheadAttention`: same arguments, results and state dict.

    Args:
        embed_dim: the width e of queries and of the output.
        num_heads: the number of heads; it must divide embed_dim.
        dropout: the probability with which a weight is dropped in training.
        bias: do the projections have one?
        add_bias_kv: append a learned key and value, which every query may see.
        add_zero_attn: append a key and value of zeros, which every query may see.
        kdim, vdim: the widths of keys and values, if they aren't e.
        batch_first: `[batch, length, width]` instead of `[length, batch, width]`.
        device, dtype: of the parameters.

    Raises Refused, a ValueError that is also what PyTorch's class would raise, for sizes that don't go
    together, TypeError or ValueError for what are no sizes.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes_given = {"embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim}
        for name, size in sizes_given.items():
            if size is not None:
                whole(size, name, least=1)
        if embed_dim % num_heads:
            raise Refused(
                f"num_heads must divide embed_dim, and num_heads = {num_heads}, embed_dim = {embed_dim} came."
            )
        if not 0 <= dropout <= 1:
            raise Refused(f"dropout must be between 0 and 1, and {dropout!r} came.")
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self.register_forward_pre_hook(_must_be_called)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights that made it if `need_weights`.

        Args:
            query: `[t, b, e]`, or `[b, t, e]` with batch_first, or `[t, e]` unbatched. With
                batch_first, query, key and value may be nested tensors instead of masked ones.
            key: `[s, b, kdim]` (and so on).
            value: `[s, b, vdim]`.
            key_padding_mask: `[b, s]` (`[s]` unbatched): boolean, True = hidden, or floats to add.
            need_weights: without it the fastest kernel runs, and no weights are built.
            attn_mask: `[t, s]` or `[b · heads, t, s]`: boolean, True = hidden, or floats to add.
            average_attn_weights: average the weights over the heads.
            is_causal: a hint that attn_mask is the causal mask (key ≤ query, both counted from 0).

        Returns:
            The output, shaped as the query, and None or the weights, differentiable and after
            dropout: `[b, t, s]`, or `[b, heads, t, s]` if not averaged; no b if unbatched. s counts
            appended keys too.

        Raises:
            TypeError: for what is no tensor. Refused: for shapes, masks and dtypes that don't go together.
        """
        masks = key_padding_mask, attn_mask
        if _is_nested(query, key, value):
            return self._nested(query, key, value, masks, need_weights, average_attn_weights)
        q, k, v, rest = self._inputs(query, key, value, *masks, is_causal)
        return self._answer(q, k, v, rest, query, need_weights, average_attn_weights)

    def _answer(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rest: dict[str, Any],
        query: Tensor,
        need_weights: bool,
        average_attn_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if not need_weights:
            out = attention(q, k, v, dropout_p=self._dropout_p(), **rest)
            return self._merge(out, query), None
        weights = F.dropout(weigh(q, k, v, **rest), self._dropout_p())  # [b, h, t, s]
        out = self._merge(mix(weights, v), query)
        if average_attn_weights:
            weights = weights.mean(1)  # [b, t, s]
        weights = weights.to(v.dtype)
        return out, weights if query.dim() == 3 else weights.squeeze(0)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, AttentionMap]:
        """The output and its map `[b, h, t, s]`: per head, before dropout, whatever the layout.

        Arguments as `forward`. Raises what that raises, TypeError or Refused, and Refused for nested tensors.
        """
        if _is_nested(query, key, value):
            raise Refused("attend takes no nested tensors: pad them and pass a key_padding_mask.")
        q, k, v, rest = self._inputs(query, key, value, key_padding_mask, attn_mask, is_causal)
        out, amap = attention_with_map(q, k, v, dropout_p=self._dropout_p(), **rest)
        return self._merge(out, query), amap

    # -- from the caller's layout to heads, and back -------------------------------------------------

    def _inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Inputs:
        self._check(query, key, value)
        q, k, v = self._project(query, key, value)  # [b, t, e], [b, s, e], [b, s, e]
        (b, t, _), s = q.shape, k.shape[1]
        masks = self._four(key_padding_mask, attn_mask, b, t, s, batched=query.dim() == 3)
        if is_causal and attn_mask is None:
            raise Refused(
                "is_causal=True is a hint about attn_mask, and no attn_mask came: pass the mask too, "
                f"for instance torch.nn.Transformer.generate_square_subsequent_mask({t})."
            )
        causal = is_causal and self._appended() == 0 and _is_triangle(attn_mask)
        if causal:
            masks.pop("attn_mask")
        k, v = self._append(k, self.bias_k), self._append(v, self.bias_v)  # [b, s + appended, e]
        rest = _rest({name: F.pad(x, (0, k.shape[1] - s)) for name, x in masks.items()}, causal)
        return self._split(q), self._split(k), self._split(v), rest

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        whole_of = (
            ("query", query, "t", self.embed_dim),
            ("key", key, "s", self.kdim),
            ("value", value, "s", self.vdim),
        )
        dtype = self.out_proj.weight.dtype
        for name, x, length, width in whole_of:
            letters = f"[b, {length}, {width}]" if self.batch_first else f"[{length}, b, {width}]"
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor {letters}, and {kind(x)} came.")
            if x.dim() not in (2, 3) or x.shape[-1] != width:
                raise Refused(
                    f"{name} must be {letters}, or [{length}, {width}] unbatched, and {sizes(x)} came."
                )
            if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
                raise Refused(
                    f"{name} is {x.dtype} and the module's parameters are {dtype}: convert one of them."
                )
        batched = query.dim() == 3
        apart = any((x.dim() == 3) != batched for x in (key, value)) or key.shape[:-1] != value.shape[:-1]
        axis = 1 - self.batch_first  # the batch's
        if apart or (batched and query.shape[axis] != key.shape[axis]):
            raise Refused(
                "query, key and value must share the batch, and key and value their length, and "
                f"query {sizes(query)}, key {sizes(key)}, value {sizes(value)} came "
                f"(batch_first={self.batch_first})."
            )

    def _batch_first(self, x: Tensor) -> Tensor:
        """`[b, t, e]`."""
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k, v, each `[b, length, e]`; one product where all three come from one tensor."""
        if query is key and key is value and self.in_proj_weight is not None:
            packed = F.linear(self._batch_first(query), self.in_proj_weight, self.in_proj_bias)
            return list(packed.chunk(3, -1))
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        parts = zip((query, key, value), weights, biases, strict=True)
        return [F.linear(self._batch_first(x), weight, bias) for x, weight, bias in parts]

    def _appended(self) -> int:
        """How many keys are appended to the caller's."""
        return (self.bias_k is not None) + bool(self.add_zero_attn)

    def _append(self, x: Tensor, learned: Tensor | None) -> Tensor:
        """Keys or values `[b, s, e]`, and after them what every query may see as well."""
        parts = [x]
        if learned is not None:
            parts.append(learned.to(x.dtype).expand(x.shape[0], 1, -1))  # [b, 1, e]
        if self.add_zero_attn:
            parts.append(x.new_zeros(x.shape[0], 1, x.shape[2]))
        return torch.cat(parts, 1) if len(parts) > 1 else x

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # [b, h, t, d]

    def _merge(self, out: Tensor, query: Tensor) -> Tensor:
        """`[b, h, t, d]` through the output projection, in the query's layout."""
        if query.dim() == 3 and not self.batch_first:
            return self.out_proj(out.permute(2, 0, 1, 3).flatten(2))  # [t, b, e]
        merged = self.out_proj(out.transpose(1, 2).flatten(2))  # [b, t, e]
        return merged if query.dim() == 3 else merged.squeeze(0)

    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    # -- masks ---------------------------------------------------------------------------------------

    def _four(
        self,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        b: int,
        t: int,
        s: int,
        batched: bool,
    ) -> dict[str, Tensor]:
        """The masks that came, checked, each with the four dimensions that broadcast to `[b, h, t, s]`."""
        h = self.num_heads
        masks = {}
        if key_padding_mask is not None:
            want = [b, s] if batched else [s]
            _check_mask(key_padding_mask, "key_padding_mask", want)
            masks["key_padding_mask"] = key_padding_mask.reshape(b, 1, 1, s)
        if attn_mask is not None:
            _check_mask(attn_mask, "attn_mask", [t, s], [b * h, t, s])
            shape = (1, 1, t, s) if attn_mask.dim() == 2 else (b, h, t, s)
            masks["attn_mask"] = attn_mask.reshape(shape)
        return masks

    # -- nested tensors ------------------------------------------------------------------------------

    def _nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        masks: tuple[Tensor | None, Tensor | None],
        need_weights: bool,
        average_attn_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Sequences of several lengths: padded, masked, and unpadded again.

        nn.TransformerEncoder makes such tensors of padded ones, in evaluation without gradients.
        """
        inputs = query, key, value
        if not all(x.is_nested for x in inputs) or not self.batch_first or masks != (None, None):
            raise Refused(
                "nested tensors come as query, key and value together, with batch_first=True and "
                f"without masks, and query, key, value nested = {[x.is_nested for x in inputs]}, "
                f"batch_first={self.batch_first}, masks given = {[m is not None for m in masks]} came."
            )
        widths = self.embed_dim, self.kdim, self.vdim
        padded = {id(x): _padded(x, width) for x, width in zip(inputs, widths, strict=True)}  # one of each
        asking, seen, told = (padded[id(x)] for x in inputs)  # [b, t, e], [b, s, kdim], [b, s, vdim]
        lengths = torch.tensor([len(x) for x in key.unbind()], device=seen.device)
        hidden = torch.arange(seen.shape[1], device=seen.device) >= lengths[:, None]  # [b, s]
        q, k, v, rest = self._inputs(asking, seen, told, hidden, None, False)
        out, weights = self._answer(q, k, v, rest, asking, need_weights, average_attn_weights)
        rows = [y[: len(x)] for x, y in zip(query.unbind(), out, strict=True)]
        return torch.nested.as_nested_tensor(rows, out.dtype, out.device, query.layout), weights


def replace(model: nn.Module) -> nn.Module:
    """Make every `nn.MultiheadAttention` in a model ours, the model itself included; returns it.

    They stay the modules that they are, with their parameters (an optimizer's too), hooks and state:
    only their class changes. Subclasses with a `forward` of their own are left alone. TypeError for what is
    no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace takes a torch.nn.Module, and {kind(model)} came.")
    for module in model.modules():
        if type(module) is nn.MultiheadAttention:
            module.__class__ = MultiheadAttention
            module.register_forward_pre_hook(_must_be_called)
    return model


def _must_be_called(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Does nothing, and by being there keeps PyTorch from passing our forward by.

    nn.TransformerEncoderLayer, in evaluation without gradients, computes its attention itself from
    the parameters of self_attn, unless one of its modules has a hook, which has to run.
    """


def _is_nested(*inputs: Any) -> bool:
    return any(isinstance(x, Tensor) and x.is_nested for x in inputs)


def _padded(x: Tensor, width: int) -> Tensor:
    """A nested tensor as `[b, length, width]`, with zeros; PyTorch's own padding refuses an empty one."""
    sequences = x.unbind()
    if not sequences:
        return torch.zeros(0, 0, width, dtype=x.dtype, device=x.device)
    return pad_sequence(list(sequences), batch_first=True)


def _check_mask(mask: Any, name: str, *shapes: list[int]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"{name} must be a tensor, boolean (True = hidden) or of floats, and {kind(mask)} came."
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise Refused(
            f"{name} must be boolean (True = hidden) or of floats, which are added, and {mask.dtype} "
            f"came: write {name} != 0 if 1 hides, {name} == 0 if 0 does."
        )
    if list(mask.shape) not in shapes:
        letters = {1: "[s]", 2: "[b, s]" if name == "key_padding_mask" else "[t, s]", 3: "[b · heads, t, s]"}
        want = " or ".join(f"{letters[len(shape)]} = {shape}" for shape in shapes)
        raise Refused(f"{name} must be {want}, and {sizes(mask)} came.")


def _rest(masks: dict[str, Tensor], causal: bool) -> dict[str, Any]:
    """Masks of theirs, four-dimensional, as the core takes them: what hides, and what is added.

    PyTorch counts positions from the top left, which is offset 0.
    """
    mask: Mask | None = Causal() if causal else None
    bias: Dense | None = None
    for name, tensor in masks.items():
        if tensor.dtype == torch.bool:
            mask = Drop(tensor) if mask is None else mask & Drop(tensor)
            continue
        try:
            bias = Dense(tensor if bias is None else bias.values + tensor)
        except ValueError:
            raise Refused(f"{name} may hold numbers and -inf (hidden), and NaN or +inf came.") from None
    return {"mask": mask, "bias": bias, "offset": 0}


def _is_triangle(mask: Tensor | None) -> bool:
    """Does a mask hide what follows each query, and nothing else?

    In a float mask what isn't hidden may hold any one number: it cancels in the softmax. Not looked
    at on a device, which would have to wait, nor while compiling: then the mask is used as it is.
    """
    if mask is None or mask.dim() != 2 or mask.device.type != "cpu" or mask.requires_grad:
        return False
    if not can_read(mask) or not mask.numel():
        return False
    after = torch.ones(mask.shape, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, after)
    level = mask[0, 0]
    return bool(level.isfinite()) and torch.equal(mask, torch.where(after, -torch.inf, level))
