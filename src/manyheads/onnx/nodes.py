"""Nodes of ONNX models that compute attention, as calls of `manyheads.attention`.

The standard is https://onnx.ai/onnx/operators/onnx__Attention.html, versions 23 to 25, as corrected in ONNX
1.23: softcap before the mask, zeros for a query without visible keys, and a causal mask that counts the keys
before the queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads import scores
from manyheads.biases import Dense
from manyheads.functional import attention
from manyheads.kernels import reference
from manyheads.layouts import merge_heads, split_heads
from manyheads.masks import Causal, Keep, Lengths, Mask, Window
from manyheads.problem import Problem
from manyheads.shapes import DTYPES, kind, sizes

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
PRECISIONS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
FLOAT, INT = 1, 2  # types of attributes, in AttributeProto
# The attributes with their types and defaults; None if there is no default.
ATTRIBUTES: dict[str, tuple[int, float | None]] = {
    "is_causal": (INT, 0),
    "kv_num_heads": (INT, None),
    "left_window_size": (INT, -1),
    "q_num_heads": (INT, None),
    "qk_matmul_output_mode": (INT, 0),
    "right_window_size": (INT, -1),
    "scale": (FLOAT, None),
    "softcap": (FLOAT, 0.0),
    "softmax_precision": (INT, None),
}


class Outputs(NamedTuple):
    """The outputs of an `Attention` node; None for those that the node doesn't have.

    Attributes:
        Y: The output `[b, h, t, w]`, or `[b, t, h·w]` if the inputs have three dimensions.
        present_key: The past keys and K, `[b, g, s, d]`.
        present_value: The past values and V, `[b, g, s, w]`.
        qk_matmul_output: The scores or weights `[b, h, t, s]` that `qk_matmul_output_mode` selects.
    """

    Y: Tensor
    present_key: Tensor | None = None
    present_value: Tensor | None = None
    qk_matmul_output: Tensor | None = None


@dataclass(frozen=True)
class AttentionNode:
    """An `Attention` node of ONNX, to be called with the node's inputs.

    Attributes:
        is_causal: Whether a query sees only its own key and earlier ones.
        scale: The factor of q·k, 1/√d if None.
        softcap: If given, scores become softcap · tanh(score / softcap).
        left_window_size: The number of keys that a query sees before its own, None for all.
        right_window_size: The number of keys after it, None for all.
        q_num_heads: The number of query heads, needed if Q has three dimensions.
        kv_num_heads: The number of key/value heads, likewise.
        qk_matmul_output_mode: What `qk_matmul_output` is: 0 the scaled scores, 1 with softcap, 2 with the
            mask, 3 the weights.
        softmax_precision: The dtype of the softmax, None for that of Q. It is computed in float32 at least.
        inputs: The names of the inputs that the node has.
        outputs: The names of its outputs.
    """

    is_causal: bool
    scale: float | None
    softcap: float | None
    left_window_size: int | None
    right_window_size: int | None
    q_num_heads: int | None
    kv_num_heads: int | None
    qk_matmul_output_mode: int
    softmax_precision: torch.dtype | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __call__(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        attn_mask: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
        nonpad_kv_seqlen: Tensor | None = None,
    ) -> Outputs:
        """Compute the node.

        Args:
            Q: The queries, `[b, h, t, d]` or `[b, t, h·d]`.
            K: The keys, `[b, g, s, d]` or `[b, s, g·d]`.
            V: The values, `[b, g, s, w]` or `[b, s, g·w]`.
            attn_mask: A boolean mask (True = may attend), or numbers that are added to the scores. It
                broadcasts to `[b, h, t, s]`; keys beyond its last are masked.
            past_key: The keys before K, `[b, g, past, d]`.
            past_value: The values before V, `[b, g, past, w]`.
            nonpad_kv_seqlen: The number of keys of each sequence that aren't padding, int64 `[b]`.

        Returns:
            The outputs.

        Raises:
            TypeError: If an input isn't a tensor, or has a dtype that isn't supported.
            ValueError: If the inputs aren't those of the node, or don't fit each other.
        """
        given = (Q, K, V, attn_mask, past_key, past_value, nonpad_kv_seqlen)
        options = self.arguments(*given)
        exact = self._widen(options)
        dtype = Q.dtype
        y = attention(**exact).to(dtype)  # [b, h, t, w]
        qk = self._qk(exact).to(dtype) if "qk_matmul_output" in self.outputs else None
        keys = options["k"] if "present_key" in self.outputs else None
        values = options["v"] if "present_value" in self.outputs else None
        return Outputs(y if Q.dim() == 4 else merge_heads(y), keys, values, qk)

    def arguments(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        attn_mask: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
        nonpad_kv_seqlen: Tensor | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of `manyheads.attention`, also for `attention_with_map` and `explain`.

        Arguments and errors are those of a call.

        Args:
            Q: The queries.
            K: The keys.
            V: The values.
            attn_mask: The mask.
            past_key: The keys before K.
            past_value: The values before V.
            nonpad_kv_seqlen: The number of keys of each sequence.

        Returns:
            The arguments by name: q, k, v, mask, bias, scale, softcap and offset.

        Raises:
            TypeError: If an input isn't a tensor, or has a dtype that isn't supported.
            ValueError: If the inputs aren't those of the node, or don't fit each other.
        """
        self._check_inputs(
            dict(zip(INPUTS, (Q, K, V, attn_mask, past_key, past_value, nonpad_kv_seqlen), strict=True))
        )
        q, k, v = self._split(Q, K, V)
        if past_key is not None and past_value is not None:
            k, v = _append("past_key", past_key, "K", k), _append("past_value", past_value, "V", v)
        b, t, s = q.shape[0], q.shape[2], k.shape[2]
        mask, bias = _read_mask(attn_mask, q, s)
        bands: list[Mask] = [Causal()] if self.is_causal else []
        if (self.left_window_size, self.right_window_size) != (None, None):
            bands.append(Window(self.left_window_size, self.right_window_size))
        offset: int | Tensor = 0 if past_key is None else past_key.shape[2]  # the position of row 0
        parts: list[Mask] = [*([] if mask is None else [mask]), *bands]
        if nonpad_kv_seqlen is not None:
            lengths = _check_lengths(nonpad_kv_seqlen, b, s)
            parts.append(Lengths(lengths))
            offset = lengths - t if bands else 0
        joined = reduce(and_, parts) if parts else None
        return {
            "q": q, "k": k, "v": v, "mask": joined, "bias": bias, "scale": self.scale,
            "softcap": self.softcap, "offset": offset,
        }  # fmt: skip

    def _check_inputs(self, given: Mapping[str, Any]) -> None:
        """Raise an error unless exactly the node's inputs are given, as tensors."""
        for name, value in given.items():
            if value is None and name in self.inputs:
                raise ValueError(f"Expected {name}, which is an input of the node, got None.")
            if value is not None and name not in self.inputs:
                raise ValueError(f"Expected no {name}, which isn't an input of the node, got {kind(value)}.")
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(
                    f"Expected {name} to be a tensor, got {kind(value)}. Convert an array with "
                    "torch.from_numpy."
                )
        for name in ("K", "V"):
            if given[name].dim() != given["Q"].dim():
                raise ValueError(
                    f"Expected Q {sizes(given['Q'])} and {name} {sizes(given[name])} to have the same number "
                    "of dimensions."
                )

    def _split(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v with four dimensions."""
        heads = (self.q_num_heads, self.kv_num_heads, self.kv_num_heads)
        found = []
        for name, x, n in zip(INPUTS, inputs, heads, strict=False):
            attribute = "q_num_heads" if name == "Q" else "kv_num_heads"
            if x.dtype not in DTYPES:
                raise TypeError(
                    f"Expected {name} to be float16, bfloat16, float32 or float64, got {x.dtype}: convert it."
                )
            if x.dim() == 4:
                if n is not None and x.shape[1] != n:
                    raise ValueError(f"Expected {name} to have {attribute} = {n} heads, got {sizes(x)}.")
            elif x.dim() != 3:
                raise ValueError(f"Expected {name} to have three or four dimensions, got {sizes(x)}.")
            elif n is None:
                raise ValueError(
                    f"Expected a node with {attribute} for {name} {sizes(x)} of three dimensions, got none."
                )
            elif x.shape[2] % n:
                raise ValueError(
                    f"Expected {attribute} = {n} to divide the last dimension of {name}, got {sizes(x)}."
                )
            else:
                x = split_heads(x, n)  # [b, heads, t, d]
            found.append(x)
        q, k, v = found
        return q, k, v

    def _widen(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with q, k, v and bias in one dtype, as wide as the node's softmax."""
        q, k, v, bias = options["q"], options["k"], options["v"], options["bias"]
        dtype = torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype))
        if self.softmax_precision == torch.float64:
            dtype = torch.float64
        if {x.dtype for x in (q, k, v)} == {dtype}:
            return options
        if bias is not None:
            bias = Dense(bias.values.to(dtype))
        return {**options, "q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "bias": bias}

    def _qk(self, options: dict[str, Any]) -> Tensor:
        """Return the scores or weights `[b, h, t, s]` that the node's mode selects."""
        problem = Problem.of(**options)
        if self.qk_matmul_output_mode == 3:
            return reference.weights(problem)[0]
        return (scores.products, scores.logits, scores.tile)[self.qk_matmul_output_mode](problem)


def from_onnx_attention(node: Any) -> AttentionNode:
    """Return a function that computes an `Attention` node of an ONNX model by `manyheads.attention`.

    It takes the node's inputs as tensors and returns its outputs. Its method `arguments` returns the
    arguments of `manyheads.attention`, from which `attention_with_map` computes the map of the weights.
    Versions 23, 24 and 25 of the standard are supported.

    Args:
        node: The node, an `onnx.NodeProto` such as an element of `model.graph.node`.

    Returns:
        The function, whose attributes are those of the node.

    Raises:
        TypeError: If node isn't a NodeProto.
        ValueError: If it isn't an `Attention` node of the standard, or has an attribute that is unknown or
            wrong.
    """
    if not all(hasattr(node, name) for name in ("op_type", "domain", "attribute", "input", "output")):
        raise TypeError(
            f"Expected an onnx.NodeProto, got {kind(node)}. Pass a node of model.graph.node, where model is "
            "the result of onnx.load."
        )
    if node.op_type != "Attention" or node.domain not in ("", "ai.onnx"):
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        hint = ""
        if node.domain == "com.microsoft" and "Attention" in node.op_type:
            hint = (
                " It is onnxruntime's own operator, whose inputs and masks differ. If onnxruntime's "
                "optimizer made it, load the model from before the optimization; else compute its queries, "
                "keys and values `[b, h, t, d]` and call manyheads.attention_with_map(q, k, v)."
            )
        elif node.op_type in ("MatMul", "Softmax"):
            hint = (
                " The model computes attention by plain operators. Export it with opset_version=23 or later, "
                "which has the operator Attention."
            )
        raise ValueError(f"Expected an Attention node of the ONNX standard, got a node of {name}.{hint}")
    values = {name: default for name, (_, default) in ATTRIBUTES.items()}
    for attribute in node.attribute:
        values[attribute.name] = _read_attribute(attribute)
    _check_values(values)
    outputs = [name for name, used in zip(Outputs._fields, node.output, strict=False) if used]
    inputs = [name for name, used in zip(INPUTS, node.input, strict=False) if used]
    if len(node.input) > len(INPUTS) or inputs[:3] != ["Q", "K", "V"] or "Y" not in outputs:
        raise ValueError(
            f"Expected a node with the inputs {', '.join(INPUTS)}, of which the first three are required, "
            f"and the output Y, got the inputs {list(node.input)} and outputs {list(node.output)}."
        )
    if ("past_key" in inputs) != ("past_value" in inputs):
        raise ValueError("Expected a node with both past_key and past_value, got one of them.")
    if "past_key" in inputs and "nonpad_kv_seqlen" in inputs:
        raise ValueError("Expected a node with past_key or nonpad_kv_seqlen, got both.")
    precision: Any = values["softmax_precision"]
    return AttentionNode(
        is_causal=bool(values["is_causal"]),
        scale=values["scale"],
        softcap=values["softcap"] or None,
        left_window_size=_bound(values["left_window_size"]),
        right_window_size=_bound(values["right_window_size"]),
        q_num_heads=_int(values["q_num_heads"]),
        kv_num_heads=_int(values["kv_num_heads"]),
        qk_matmul_output_mode=int(values["qk_matmul_output_mode"] or 0),
        softmax_precision=None if precision is None else PRECISIONS[precision],
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )


def _read_attribute(attribute: Any) -> float:
    """Return the number of an attribute; raise ValueError if it isn't known."""
    if attribute.name not in ATTRIBUTES:
        raise ValueError(
            f"Expected the attributes {', '.join(ATTRIBUTES)} of Attention, got {attribute.name}, which "
            "isn't supported."
        )
    expected, _ = ATTRIBUTES[attribute.name]
    if attribute.type != expected or attribute.ref_attr_name:
        raise ValueError(
            f"Expected the attribute {attribute.name} to be {'an int' if expected == INT else 'a float'}, "
            "got another type, or a reference to an attribute of a function. Inline the functions of the "
            "model first (onnx.inliner)."
        )
    return attribute.i if expected == INT else attribute.f


def _check_values(values: Mapping[str, float | None]) -> None:
    """Raise ValueError for numbers that the standard doesn't allow."""
    allowed: dict[str, tuple[bool, str]] = {}
    for name, value in values.items():
        if value is None:
            continue
        if name == "is_causal":
            allowed[name] = value in (0, 1), "0 or 1"
        elif name.endswith("num_heads"):
            allowed[name] = value >= 1, "at least 1"
        elif name.endswith("window_size"):
            allowed[name] = value >= -1, "at least -1 (no bound)"
        elif name == "qk_matmul_output_mode":
            allowed[name] = value in (0, 1, 2, 3), "0, 1, 2 or 3"
        elif name == "softmax_precision":
            allowed[name] = value in PRECISIONS, "1 (float32), 10 (float16), 11 (float64) or 16 (bfloat16)"
        else:
            allowed[name] = 0 <= value < math.inf, "a finite number, at least 0"
    for name, (is_allowed, what) in allowed.items():
        if not is_allowed:
            raise ValueError(f"Expected the attribute {name} to be {what}, got {values[name]}.")
    q_heads, kv_heads = values["q_num_heads"], values["kv_num_heads"]
    if q_heads is not None and kv_heads is not None and q_heads % kv_heads:
        raise ValueError(
            f"Expected kv_num_heads to divide q_num_heads, got kv_num_heads = {kv_heads} and q_num_heads = "
            f"{q_heads}."
        )


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)


def _bound(value: float | None) -> int | None:
    """Return a bound of the window, None for −1."""
    return None if value is None or value < 0 else int(value)


def _append(past_name: str, past: Tensor, name: str, x: Tensor) -> Tensor:
    """Return past keys or values, followed by new ones: `[b, g, past + s, d]`."""
    fits = past.dim() == 4 and past.shape[:2] == x.shape[:2] and past.shape[3] == x.shape[3]
    if not fits or past.dtype != x.dtype:
        raise ValueError(
            f"Expected {past_name} to be [b, g, past, …] as {name} {sizes(x)} of {x.dtype}, got "
            f"{sizes(past)} of {past.dtype}."
        )
    return torch.cat((past, x), 2)


def _check_lengths(lengths: Tensor, b: int, s: int) -> Tensor:
    if lengths.dtype not in (torch.int64, torch.int32) or tuple(lengths.shape) != (b,):
        raise ValueError(
            f"Expected nonpad_kv_seqlen to be integers [b] = [{b}], got {kind(lengths)} {sizes(lengths)}."
        )
    lengths = lengths.to(torch.int64)
    if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= s:
        raise ValueError(f"Expected nonpad_kv_seqlen between 0 and s = {s}, got {lengths.tolist()}.")
    return lengths


def _read_mask(attn_mask: Tensor | None, q: Tensor, s: int) -> tuple[Keep | None, Dense | None]:
    """Return a mask as a `Keep`, or as a `Dense` if it has numbers that are added."""
    if attn_mask is None:
        return None, None
    b, h, t, _ = q.shape
    if attn_mask.dtype != torch.bool and attn_mask.dtype != q.dtype:
        raise TypeError(
            f"Expected attn_mask to be a boolean mask or numbers in the dtype of Q, {q.dtype}, got "
            f"{attn_mask.dtype}."
        )
    shape = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    fits = len(shape) == 4 and shape[3] <= s
    if not fits or any(n not in (1, size) for n, size in zip(shape[:3], (b, h, t), strict=True)):
        raise ValueError(
            f"Expected attn_mask to broadcast to [b, h, t, s] = {[b, h, t, s]}, with at most s keys, got "
            f"{sizes(attn_mask)}."
        )
    if shape[3] == 1 < s:
        raise ValueError(
            f"Expected attn_mask with more than one of the {s} keys, got {sizes(attn_mask)}: the standard "
            "both broadcasts this and masks the other keys. Expand it to all keys."
        )
    is_bool = attn_mask.dtype == torch.bool
    # Keys beyond the last of the mask are masked.
    tensor = F.pad(attn_mask.reshape(shape), (0, s - shape[3]), value=False if is_bool else -math.inf)
    return (Keep(tensor), None) if is_bool else (None, Dense(tensor))
