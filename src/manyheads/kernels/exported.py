"""Attention in graphs that are exported to ONNX: the standard's operator `Attention`, or plain operators.

This isn't a kernel that can be chosen: while torch.onnx.export traces a model, `run` computes each call of
attention in operators for which ONNX has translations, whatever the kernel. `manyheads.onnx.export` sets a
`Target`, so that the version of the standard is known and each decision is recorded.

The operator (https://onnx.ai/onnx/operators/onnx__Attention.html) is used for problems that every runtime
computes as `attention` does. Its text was corrected in ONNX 1.23 without a new version: softcap before the
mask, and zeros for a query without visible keys. onnxruntime before 1.28 has softcap after the mask, and NaN
or a mean of all values for such a query.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from manyheads import scores
from manyheads.kernels import reference, sdpa
from manyheads.kernels.fused import FusedStatistics, Spec
from manyheads.masks import Normal
from manyheads.problem import ALL, Problem

NAME = "exported"
FIRST_OPSET = 23  # the first version of the standard with the operator
CHOICES = ("auto", "operator", "plain")
FLOAT = 1  # the standard's number of float32


@dataclass(frozen=True)
class Call:
    """How one call of attention was exported.

    Attributes:
        module: The name of the module that called attention, empty if it isn't known.
        operator: Whether it became an `Attention` operator.
        reasons: Why plain operators were used; empty for the operator.
        mask: The mask and bias of the operator: "none", "is_causal", "a boolean mask" or "an additive mask".
    """

    module: str
    operator: bool
    reasons: tuple[str, ...] = ()
    mask: str = "none"

    def __str__(self) -> str:
        name = self.module or "attention"
        if self.operator:
            return f"{name}: Attention, {self.mask.replace('none', 'no mask')}"
        return f"{name}: plain operators, because {'; '.join(self.reasons)}"


@dataclass(eq=False)
class Target:
    """What a graph is exported to.

    Attributes:
        opset: The version of the standard.
        attention: "auto": the operator where every runtime computes the same; "operator": the operator where
            the current text of the standard is the same, and an error elsewhere; "plain": plain operators.
        modules: The names of the modules that are running, the innermost last.
        calls: The calls so far.
    """

    opset: int
    attention: str = "auto"
    modules: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


_targets: list[Target] = []  # the innermost last


@contextmanager
def exporting(target: Target) -> Iterator[Target]:
    """Use a target for the calls that are traced inside of the context."""
    _targets.append(target)
    try:
        yield target
    finally:
        _targets.remove(target)


def is_active(problem: Problem) -> bool:
    """Return True if a problem is traced for ONNX. Calls in other threads don't have fake tensors."""
    return (bool(_targets) or torch.onnx.is_in_onnx_export()) and is_fake(problem.q)


def run(problem: Problem) -> tuple[Tensor, None]:
    """Return the output `[b, h, t, w]` in operators that ONNX has; no log-sum-exp."""
    if problem.dropout_p:
        raise ValueError(
            f"Expected attention without dropout for ONNX, got dropout_p={problem.dropout_p}. Call "
            "model.eval() before the export."
        )
    target = _targets[-1] if _targets else None
    reasons = why_plain(problem, target)
    if reasons and target is not None and target.attention == "operator":
        raise ValueError(
            f"The Attention operator doesn't compute this: {'; '.join(reasons)}. "
            'Use attention="auto", which exports it as plain operators.'
        )
    out, mask = (reference.run(_unscaled(problem))[0], "none") if reasons else _operator(problem, target)
    if target is not None:
        module = target.modules[-1] if target.modules else ""
        target.calls.append(Call(module, not reasons, tuple(reasons), mask))
    return out, None


def _unscaled(problem: Problem) -> Problem:
    """Return the same problem with q multiplied by the scale, for float64.

    PyTorch's exporter stores a Python number in float32, but a tensor in its own dtype.
    """
    if problem.q.dtype != torch.float64:
        return problem
    scale = torch.tensor(problem.scale, dtype=torch.float64, device=problem.q.device)
    return replace(problem, q=problem.q * scale, scale=1.0)


def statistics(problem: Problem, spec: Spec | None, lse: Tensor | None) -> tuple[Tensor, FusedStatistics]:
    """Return the log-sum-exp `[b, h, t]`, and no fused statistics."""
    return reference.weights(problem)[1] if lse is None else lse, {}


tile = scores.tile


def why_plain(problem: Problem, target: Target | None) -> list[str]:
    """Return why a problem is exported as plain operators; empty if the operator computes it.

    Without a target, the version of the standard isn't known. Then PyTorch's own attention is traced, which
    its exporter translates to the operator or to plain operators.
    """
    q, shape = problem.q, problem.shape
    if target is not None and target.attention == "plain":
        return ["they were requested"]
    reasons = []
    if target is not None and target.opset < FIRST_OPSET:
        reasons.append(f"opset {target.opset} has no Attention operator (opset {FIRST_OPSET} has)")
    if problem.sink is not None:
        reasons.append("the operator has no sinks")
    if q.dtype == torch.float64:
        reasons.append("the operator's scale and softcap are float32 numbers, and q is float64")
    if not problem.scale > 0:
        reasons.append(f"the operator computes the square root of the scale, which is {problem.scale}")
    if problem.softcap is not None:
        if target is None:
            reasons.append("PyTorch's exporter has no softcap")
        elif target.attention == "auto" and (problem.mask is not None or problem.bias is not None):
            reasons.append("with softcap and a mask, onnxruntime before 1.28 computes something else")
    if problem.bias is not None and q.dtype != torch.float32 and not _has_dtype_of_q(problem):
        reasons.append(f"the operator would round the bias to {q.dtype}")
    if any(isinstance(size, int) and size == 0 for size in shape):
        reasons.append(f"a size is 0 ({shape.zeros()})")
    return reasons


def _has_dtype_of_q(problem: Problem) -> bool:
    values = getattr(problem.bias, "values", None)  # of Dense
    return isinstance(values, Tensor) and values.dtype == problem.q.dtype


def _operator(problem: Problem, target: Target | None) -> tuple[Tensor, str]:
    """Return the output `[b, h, t, w]` of the operator, and how it is masked, as in `Call.mask`."""
    if problem.bias is None and sdpa.is_fully_visible(problem):
        return _attend(problem, None, False, target), "none"
    if problem.bias is None and _is_causal(problem):
        return _attend(problem, None, True, target), "is_causal"
    shape = problem.shape
    keep = None if problem.mask is None else problem.keep(problem.mask, ALL, ALL)
    visible: Tensor | None
    if problem.bias is None:
        assert keep is not None
        tensor, visible, name = keep, keep, "a boolean mask"
    else:
        tensor, name = problem.bias.add(*problem.at(ALL, ALL), problem.dtype), "an additive mask"
        if keep is not None:
            tensor = torch.where(keep, tensor, -math.inf)
        visible = None if keep is None and not problem.bias.can_mask else tensor != -math.inf
        tensor = tensor.to(problem.q.dtype)
    # onnxruntime doesn't broadcast a mask over t and s (1.32).
    tensor = tensor.expand(tensor.shape[0], tensor.shape[1], shape.t, shape.s)
    if visible is None:
        return _attend(problem, tensor, False, target), name
    visible = visible.expand(tensor.shape)
    out = _attend(problem.without_masked_keys(visible), tensor, False, target)
    # Older runtimes return NaN or a mean of all values for a query without visible keys.
    return torch.where(visible.any(-1, keepdim=True), out, 0.0), name


def _attend(problem: Problem, mask: Tensor | None, is_causal: bool, target: Target | None) -> Tensor:
    """Return the output `[b, h, t, w]` of one node."""
    q, k, v, shape = problem.q, problem.k, problem.v, problem.shape
    if target is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=problem.scale, enable_gqa=shape.h != shape.g
        )
    attributes: dict[str, Any] = {"scale": problem.scale}
    if is_causal:
        attributes["is_causal"] = 1
    if problem.softcap is not None:
        attributes["softcap"] = problem.softcap
    if q.dtype != torch.float32:
        attributes["softmax_precision"] = FLOAT
    inputs = (q, k, v) if mask is None else (q, k, v, mask)
    return torch.onnx.ops.symbolic(
        "Attention",
        inputs,
        attributes,
        dtype=q.dtype,
        shape=(shape.b, shape.h, shape.t, shape.w),
        version=min(target.opset, 24),
    )


def _is_causal(problem: Problem) -> bool:
    """Return True if row i sees the keys 0 to i of as many keys as queries, whatever the sizes."""
    shape = problem.shape
    return (
        problem.mask is not None
        and problem.mask.normal() == Normal(band=(None, 0))
        and not isinstance(problem.offset, Tensor)
        and sdpa.holds(problem.offset == 0)
        and sdpa.holds(shape.t == shape.s)
    )


def decompositions() -> dict[Any, Any]:
    """Return how to replace this library's operators in an exported program, for `run_decompositions`."""
    from manyheads.kernels import chunked, native, operator

    def replace(*args: Any) -> tuple[Tensor, Tensor]:
        problem = operator.problem_of(*args)
        # If nothing uses the log-sum-exp, its nodes are removed.
        return run(problem)[0], reference.weights(problem)[1]

    return {getattr(torch.ops.manyheads, name).default: replace for name in (native.NAME, chunked.NAME)}
