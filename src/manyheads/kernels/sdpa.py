"""PyTorch's fused attention, for the problems that it computes exactly.

For some problems, `F.scaled_dot_product_attention` silently uses its math path, which stores all weights.
This kernel doesn't support these problems. It returns no log-sum-exp. NaN in masked keys and values can
change the output, so `kernels.run` checks inputs and output.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.biases import Dense
from manyheads.kernels.batched import raise_second_gradient
from manyheads.masks import Keep
from manyheads.problem import ALL, Problem
from manyheads.shapes import can_read, transforms

NAME = "sdpa"
GIVES_LSE = False
SHIELDS = False

LIMIT = 64 * 2**20  # maximum bytes of a tensor that is made of the mask and bias


def why_unsupported(problem: Problem) -> list[str]:
    """Return why PyTorch's fused kernels don't support this problem; empty if they do."""
    shape = problem.shape
    reasons = []
    if problem.forward_mode():
        reasons.append("it has no forward-mode derivative")
    if not torch.compiler.is_compiling():
        active = transforms()
        if "vmap" in active:
            reasons.append("under vmap its output can't be checked for NaN and Inf")
        if active.count("grad") > 1:
            reasons.append("PyTorch's fused kernels have no second gradient")
    if 0 in shape:
        reasons.append(f"a size is 0 ({shape.zeros()}), for which PyTorch has no fused kernel")
    if problem.softcap is not None:
        reasons.append("it has no softcap")
    if problem.sink is not None:
        reasons.append("it has no sinks")
    if problem.dropout_p:
        reasons.append("with dropout PyTorch uses its math path, which stores all weights")
    if shape.w != shape.d:
        reasons.append(f"PyTorch uses its math path for values of width {shape.w}, keys of width {shape.d}")
    if any(x.stride(-1) != 1 for x in (problem.q, problem.k, problem.v)):
        reasons.append("PyTorch uses its math path if the last dimension of q, k or v isn't contiguous")
    if problem.bias is not None:
        if torch.is_grad_enabled() and problem.bias.tensor().requires_grad:
            reasons.append("it computes no gradient of a bias")
        if problem.q.dtype in (torch.float16, torch.bfloat16) and not _has_bias_of_same_dtype(problem):
            reasons.append(f"it would round the bias to {problem.q.dtype}")
    if needs_tensor(problem) and not _given_as_tensor(problem):
        size = _mask_bytes(problem)
        if size > LIMIT:
            reasons.append(
                f"the mask and bias would have to be stored as a tensor of {size / 2**20:,.0f} MiB "
                f"(at most {LIMIT // 2**20})"
            )
    if problem.q.device.type == "cuda":
        reasons += _why_unsupported_on_cuda(problem)
    return reasons


def _why_unsupported_on_cuda(problem: Problem) -> list[str]:
    """Return why PyTorch's CUDA kernels don't support this problem.

    The one that supports float32 and mask tensors doesn't support grouped heads.
    """
    reasons = []
    if problem.q.dtype == torch.float64:
        reasons.append("PyTorch has no fused kernel for float64 on CUDA")
    if problem.shape.d > 256:
        reasons.append(f"head size {problem.shape.d} is above 256")
    # It gave NaN for head sizes of 1 and 12 in float16, with gradients (PyTorch 2.11 on an H100).
    if problem.q.dtype.itemsize == 2 and problem.shape.d % 8 and problem.wants_gradient():
        reasons.append(f"head size {problem.shape.d} is not a multiple of 8, and 16-bit gradients are wanted")
    if problem.shape.h != problem.shape.g and (problem.q.dtype == torch.float32 or needs_tensor(problem)):
        reasons.append("with grouped heads PyTorch fuses only 16-bit problems without a mask tensor on CUDA")
    return reasons


def run(problem: Problem) -> tuple[Tensor, None]:
    """Return the output `[b, h, t, w]`; no log-sum-exp."""
    shape = problem.shape
    tensor, causal = None, False
    if needs_tensor(problem):
        tensor = _build_tensor(problem)
        if not can_read(problem.q) or problem.q.device.type != "cpu":
            problem = problem.without_masked_keys(tensor if problem.bias is None else tensor != -math.inf)
    elif not is_fully_visible(problem):
        causal = True  # queries attend to the first t keys at most, so the other keys are left out
        problem = replace(problem, k=problem.k[:, :, : shape.t], v=problem.v[:, :, : shape.t])
    grouped = False
    if shape.h != shape.g:  # while tracing, the comparison is symbolic; the branch makes it a bool
        grouped = True
    q, k, v, scale = problem.q, problem.k, problem.v, problem.scale
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=tensor, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    if not (torch.compiler.is_compiling() or transforms()):
        _forbid_second_gradient(out)
    return out, None


def _forbid_second_gradient(out: Tensor) -> None:
    """Make a second gradient raise a clear error; PyTorch's own error names an internal operator."""
    node = out.grad_fn
    # The math path, which has other nodes, supports second gradients.
    if node is not None and node.name().startswith("ScaledDotProduct"):
        node.register_hook(_forbid_gradients_of)


def _forbid_gradients_of(grads: tuple[Tensor | None, ...], _: Any) -> None:
    """Make the autograd nodes of gradients raise; gradients have nodes only with `create_graph=True`."""
    for grad in grads:
        if grad is not None and grad.grad_fn is not None:
            grad.grad_fn.register_prehook(raise_second_gradient)


def _is_causal(problem: Problem) -> bool:
    """Return True if the mask is the top-left triangle, which PyTorch calls causal."""
    if problem.mask is None or not isinstance(problem.offset, int | torch.SymInt):
        return False
    if not holds(problem.offset == 0):
        return False
    if problem.scale <= 0:  # PyTorch multiplies the −inf of its own causal mask by the scale: NaN (2.13, CPU)
        return False
    band, segments, lengths, rest = problem.mask.normal()
    return band == (None, 0) and len(segments) + len(lengths) + len(rest) == 0


def holds(condition: Any) -> bool:
    """Return True if a condition on sizes holds; for all sizes of the graph, while a model is exported."""
    if torch.compiler.is_exporting() or isinstance(condition, torch.SymBool):
        # A bool of the condition would restrict the graph to the sizes for which it is the same.
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # it takes 0.6 s to import

        return statically_known_true(condition)
    return bool(condition)


def is_fully_visible(problem: Problem) -> bool:
    """Return True if the mask is a band that contains all keys of all rows, as Causal for one last query."""
    if problem.mask is None:
        return True
    (low, high), segments, lengths, rest = problem.mask.normal()
    if len(segments) + len(lengths) + len(rest) > 0:
        return False
    if low is None and high is None:
        return True
    if not isinstance(problem.offset, int | torch.SymInt):
        return False
    top, bottom = problem.offset, problem.offset + problem.shape.t - 1
    return (low is None or holds(bottom + low <= 0)) and (
        high is None or holds(top + high >= problem.shape.s - 1)
    )


def needs_tensor(problem: Problem) -> bool:
    """Return True if the mask and bias have to be passed to PyTorch as a tensor."""
    return problem.bias is not None or not (is_fully_visible(problem) or _is_causal(problem))


def _given_as_tensor(problem: Problem) -> bool:
    """Return True if the caller passed the mask as a tensor."""
    return problem.bias is None and isinstance(problem.mask, Keep)  # Drop is a subclass


def _mask_bytes(problem: Problem) -> int:
    """Return the most bytes that `_build_tensor` needs; a mask may turn out to broadcast over b or h."""
    b, h = 1, 1
    for part in (problem.mask, problem.bias):
        if part is not None:
            part_b, part_h = problem.broadcast_sizes(part)
            b, h = max(b, part_b), max(h, part_h)
    # PyTorch converts masks to q's dtype.
    return b * h * problem.shape.t * problem.shape.s * problem.q.element_size()


def _has_bias_of_same_dtype(problem: Problem) -> bool:
    """Return True if the bias is a tensor of the queries' own dtype."""
    return isinstance(problem.bias, Dense) and problem.bias.values.dtype == problem.q.dtype


def _build_tensor(problem: Problem) -> Tensor:
    """Return `attn_mask`: a boolean mask, or a bias to add to the scores, with −inf where masked."""
    shape = problem.shape
    keep = None if problem.mask is None else problem.keep(problem.mask, ALL, ALL)
    if problem.bias is None:
        assert keep is not None
        return keep.expand(keep.shape[0], keep.shape[1], shape.t, shape.s)
    added = problem.bias.add(*problem.at(ALL, ALL), problem.dtype)
    if keep is not None:
        added = torch.where(keep, added, -math.inf)
    return added.expand(*added.shape[:2], shape.t, shape.s).to(problem.q.dtype)
