"""Presentation 2: a replacement of `torch.nn.MultiheadAttention`.

    model = replace(nn.TransformerEncoder(…))      # replace all modules of a model
    attention = MultiheadAttention(512, 8)         # or make a single module

As in PyTorch, True in a boolean mask means masked, and a float mask is added to the scores. Differences:

- A query without visible keys gets zeros (and zero weights), not NaN.
- `attn_mask` is always used: the hint `is_causal` is verified, and a wrong hint has no effect. (In PyTorch,
  outputs with a wrong hint depend on `need_weights`.)
- `forward` always runs. PyTorch's transformer layers would bypass it in evaluation without gradients.

It subclasses nn.MultiheadAttention so that parameters have the same names and random values, and `isinstance`
checks (in initializers, adapters and converters) succeed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from manyheads.biases import Dense
from manyheads.classic.common import Inputs, mix, weigh
from manyheads.functional import attention, attention_with_map
from manyheads.layouts import merge_heads, project_inputs, reshape_masks, split_heads
from manyheads.maps import AttentionMap
from manyheads.masks import Causal, Drop, Mask
from manyheads.shapes import can_read, kind, sizes, whole


class Refused(ValueError, AssertionError, RuntimeError):
    """An error about inputs that don't fit each other.

    PyTorch's class raises AssertionError for some of them and RuntimeError for others. This class is derived
    from both, so that code that catches either still works.
    """


class MultiheadAttention(nn.MultiheadAttention):
    """A replacement of `torch.nn.MultiheadAttention` with the same arguments, results and state dict.

    Args:
        embed_dim: The width e of queries and of the output.
        num_heads: The number of heads, a divisor of embed_dim.
        dropout: The dropout probability of weights.
        bias: Whether the projections have a bias.
        add_bias_kv: Whether to append a learned key and value that are visible to every query.
        add_zero_attn: Whether to append a key and value of zeros that are visible to every query.
        kdim: The width of keys, e if None.
        vdim: The width of values, e if None.
        batch_first: Whether inputs are `[batch, length, width]`, not `[length, batch, width]`.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Raises:
        TypeError: If a size isn't an integer.
        ValueError: If a size is less than 1.
        Refused: If num_heads doesn't divide embed_dim, or dropout isn't a probability.
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
        numbers = {"embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim}
        for name, size in numbers.items():
            if size is not None:
                whole(size, name, least=1)
        if embed_dim % num_heads:
            raise Refused(
                f"Expected num_heads to divide embed_dim, got num_heads = {num_heads} and embed_dim = "
                f"{embed_dim}."
            )
        if not 0 <= dropout <= 1:
            raise Refused(f"Expected dropout to be between 0 and 1, got {dropout!r}.")
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
        self.register_forward_pre_hook(_prevent_bypass)

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
        """Attend from queries to keys.

        Args:
            query: The queries `[t, b, e]`, `[b, t, e]` with batch_first, or `[t, e]` unbatched. With
                batch_first, query, key and value can be nested tensors.
            key: The keys `[s, b, kdim]`, likewise.
            value: The values `[s, b, vdim]`, likewise.
            key_padding_mask: A mask `[b, s]` (`[s]` unbatched) of booleans, True = masked, or floats to add.
            need_weights: Whether to return the weights. If not, the fastest kernel is used.
            attn_mask: A mask `[t, s]` or `[b · heads, t, s]` of booleans, True = masked, or floats to add.
            average_attn_weights: Whether to average the weights over the heads.
            is_causal: A hint that attn_mask is the causal mask (key ≤ query, both counted from 0).

        Returns:
            The output, with the shape of the query, and the weights or None. The weights are differentiable
            and after dropout: `[b, t, s]`, or `[b, heads, t, s]` if they aren't averaged, without b if
            unbatched. s includes appended keys.

        Raises:
            TypeError: If an input isn't a tensor.
            Refused: If shapes, masks or dtypes don't fit each other.
        """
        nested = query if _is_nested(query, key, value) else None
        if nested is not None:
            query, key, value, key_padding_mask = self._pad(query, key, value, key_padding_mask, attn_mask)
            is_causal = False
        q, k, v, options = self._inputs(query, key, value, key_padding_mask, attn_mask, is_causal)
        weights: Tensor | None = None
        if need_weights:
            weights = F.dropout(weigh(q, k, v, **options), self._dropout_p())  # [b, h, t, s]
            out = self._merge(mix(weights, v), query)
            weights = (weights.mean(1) if average_attn_weights else weights).to(v.dtype)
            weights = weights if query.dim() == 3 else weights.squeeze(0)
        else:
            out = self._merge(attention(q, k, v, dropout_p=self._dropout_p(), **options), query)
        if nested is not None:
            rows = [row[: len(x)] for x, row in zip(nested.unbind(), out, strict=True)]
            out = torch.nested.as_nested_tensor(rows, out.dtype, out.device, nested.layout)
        return out, weights

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, AttentionMap]:
        """Return the output and its map `[b, h, t, s]`, before dropout.

        Args:
            query: The queries `[t, b, e]`, as in `forward`.
            key: The keys `[s, b, kdim]`, as in `forward`.
            value: The values `[s, b, vdim]`, as in `forward`.
            key_padding_mask: The mask `[b, s]`, as in `forward`.
            attn_mask: The mask `[t, s]` or `[b · heads, t, s]`, as in `forward`.
            is_causal: A hint that attn_mask is the causal mask.

        Returns:
            The output and the map.

        Raises:
            TypeError: If an input isn't a tensor.
            Refused: If shapes, masks or dtypes don't fit each other, or a tensor is nested.
        """
        if _is_nested(query, key, value):
            raise Refused("Expected padded tensors, got a nested one. Pad it and pass a key_padding_mask.")
        q, k, v, options = self._inputs(query, key, value, key_padding_mask, attn_mask, is_causal)
        out, amap = attention_with_map(q, k, v, dropout_p=self._dropout_p(), **options)
        return self._merge(out, query), amap

    # -- conversion of inputs to heads, and of heads to the output -----------------------------------

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
        if key_padding_mask is not None:
            _check_mask(key_padding_mask, "key_padding_mask", [b, s] if query.dim() == 3 else [s])
        if attn_mask is not None:
            _check_mask(attn_mask, "attn_mask", [t, s], [b * self.num_heads, t, s])
        masks = reshape_masks(key_padding_mask, attn_mask, self.num_heads, b, t, s)
        if is_causal and attn_mask is None:
            raise Refused(
                "Expected an attn_mask with is_causal=True, which is only a hint about it, got none. Pass "
                f"torch.nn.Transformer.generate_square_subsequent_mask({t})."
            )
        causal = is_causal and self._appended() == 0 and _is_triangle(attn_mask)
        if causal:
            masks.pop("attn_mask")
        k, v = self._append(k, self.bias_k), self._append(v, self.bias_v)  # [b, s + appended, e]
        options = _options({name: F.pad(x, (0, k.shape[1] - s)) for name, x in masks.items()}, causal)
        q, k, v = (split_heads(x, self.num_heads) for x in (q, k, v))
        return q, k, v, options

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        dtype = self.out_proj.weight.dtype
        for name, x, length, width in (
            ("query", query, "t", self.embed_dim),
            ("key", key, "s", self.kdim),
            ("value", value, "s", self.vdim),
        ):
            letters = f"[b, {length}, {width}]" if self.batch_first else f"[{length}, b, {width}]"
            if not isinstance(x, Tensor):
                raise TypeError(f"Expected {name} to be a tensor {letters}, got {kind(x)}.")
            if x.dim() not in (2, 3) or x.shape[-1] != width:
                raise Refused(
                    f"Expected {name} to be {letters}, or [{length}, {width}] unbatched, got {sizes(x)}."
                )
            if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
                raise Refused(
                    f"Expected {name} to be {dtype} like the module's parameters, got {x.dtype}. Convert one."
                )
        differ = query.dim() != key.dim() or key.shape[:-1] != value.shape[:-1]
        axis = 1 - self.batch_first  # the axis of the batch
        if differ or (query.dim() == 3 and query.shape[axis] != key.shape[axis]):
            raise Refused(
                "Expected the same batch in query, key and value, and the same length in key and value, got "
                f"query {sizes(query)}, key {sizes(key)}, value {sizes(value)} "
                f"(batch_first={self.batch_first})."
            )

    def _batch_first(self, x: Tensor) -> Tensor:
        """Return x as `[b, t, e]`."""
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return q, k and v `[b, length, e]`, computed in one product if all inputs are the same tensor."""
        if query is key and key is value and self.in_proj_weight is not None:
            packed = F.linear(self._batch_first(query), self.in_proj_weight, self.in_proj_bias)
            return list(packed.chunk(3, -1))
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        return project_inputs(map(self._batch_first, (query, key, value)), weights, self.in_proj_bias)

    def _appended(self) -> int:
        """Return the number of appended keys."""
        return (self.bias_k is not None) + bool(self.add_zero_attn)

    def _append(self, x: Tensor, learned: Tensor | None) -> Tensor:
        """Append keys or values that are visible to every query to x `[b, s, e]`."""
        parts = [x]
        if learned is not None:
            parts.append(learned.to(x.dtype).expand(x.shape[0], 1, -1))  # [b, 1, e]
        if self.add_zero_attn:
            parts.append(x.new_zeros(x.shape[0], 1, x.shape[2]))
        return torch.cat(parts, 1) if len(parts) > 1 else x

    def _merge(self, out: Tensor, query: Tensor) -> Tensor:
        """Project the heads `[b, h, t, d]` to the output, in the layout of the query."""
        if query.dim() == 3 and not self.batch_first:
            return self.out_proj(out.permute(2, 0, 1, 3).flatten(2))  # [t, b, e]
        merged = self.out_proj(merge_heads(out))  # [b, t, e]
        return merged if query.dim() == 3 else merged.squeeze(0)

    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    def _pad(
        self, query: Tensor, key: Tensor, value: Tensor, *masks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return nested tensors as padded ones, and the key_padding_mask `[b, s]`.

        nn.TransformerEncoder creates nested tensors from padded ones, in evaluation without gradients.
        """
        inputs = query, key, value
        if not all(x.is_nested for x in inputs) or not self.batch_first or masks != (None, None):
            raise Refused(
                "Expected nested tensors for all of query, key and value, batch_first=True and no masks, got "
                f"nested = {[x.is_nested for x in inputs]}, batch_first={self.batch_first}, masks = "
                f"{[mask is not None for mask in masks]}."
            )
        widths = self.embed_dim, self.kdim, self.vdim
        padded = {id(x): _pad_nested(x, width) for x, width in zip(inputs, widths, strict=True)}
        queries, keys, values = (padded[id(x)] for x in inputs)  # [b, t, e], [b, s, kdim], [b, s, vdim]
        lengths = torch.tensor([len(x) for x in key.unbind()], device=keys.device)
        masked = torch.arange(keys.shape[1], device=keys.device) >= lengths[:, None]  # [b, s]
        return queries, keys, values, masked


def replace(model: nn.Module) -> nn.Module:
    """Replace every `nn.MultiheadAttention` of a model, including the model itself.

    Only the class of the modules changes: their parameters, also in optimizers, and their hooks stay.
    Subclasses of `nn.MultiheadAttention` aren't replaced.

    Args:
        model: The model, which is changed in place.

    Returns:
        The model.

    Raises:
        TypeError: If it isn't a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected a torch.nn.Module, got {kind(model)}.")
    for module in model.modules():
        if type(module) is nn.MultiheadAttention:
            module.__class__ = MultiheadAttention
            module.register_forward_pre_hook(_prevent_bypass)
    return model


def _prevent_bypass(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Do nothing: a hook whose presence keeps PyTorch from bypassing `forward`.

    In evaluation without gradients, nn.TransformerEncoderLayer computes attention from the parameters of
    self_attn, unless one of its modules has a hook.
    """


def _is_nested(*inputs: Any) -> bool:
    return any(isinstance(x, Tensor) and x.is_nested for x in inputs)


def _pad_nested(x: Tensor, width: int) -> Tensor:
    """Return a nested tensor padded with zeros, `[b, length, width]`. PyTorch raises if it is empty."""
    sequences = x.unbind()
    if not sequences:
        return torch.zeros(0, 0, width, dtype=x.dtype, device=x.device)
    return pad_sequence(list(sequences), batch_first=True)


def _check_mask(mask: Any, name: str, *shapes: list[int]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"Expected {name} to be a tensor of booleans (True = masked) or floats, got {kind(mask)}."
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise Refused(
            f"Expected {name} to be boolean (True = masked) or floats to add, got {mask.dtype}. Write "
            f"{name} != 0 if 1 means masked, {name} == 0 if 0 does."
        )
    if list(mask.shape) not in shapes:
        letters = {1: "[s]", 2: "[b, s]" if name == "key_padding_mask" else "[t, s]", 3: "[b · heads, t, s]"}
        expected = " or ".join(f"{letters[len(shape)]} = {shape}" for shape in shapes)
        raise Refused(f"Expected {name} to be {expected}, got {sizes(mask)}.")


def _options(masks: dict[str, Tensor], causal: bool) -> dict[str, Any]:
    """Convert four-dimensional PyTorch masks to the arguments of `manyheads.attention`.

    PyTorch counts positions of queries and keys from 0, which is offset 0.
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
            raise Refused(f"Expected numbers or -inf (masked) in {name}, got NaN or +inf.") from None
    return {"mask": mask, "bias": bias, "offset": 0}


def _is_triangle(mask: Tensor | None) -> bool:
    """Return True if a mask is known to be the causal mask.

    The visible entries of a float mask may be any constant, which cancels in the softmax. A mask isn't read
    on a GPU, because that would wait for the device, or during compilation, because that would fail. It is
    then used like any other mask.
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
