"""PyTorch's fused attention, for the problems that it computes exactly.

For some problems, `F.scaled_dot_product_attention` silently uses its math path, which stores all weights.
This kernel doesn't support these problems. It returns no log-sum-exp. NaN in masked keys and values can leak
into the output, so `kernels.run` checks inputs and output.
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
    p, n = problem, problem.shape
    reasons = []
    if p.forward_mode():
        reasons.append("it has no forward-mode derivative")
    if not torch.compiler.is_compiling():
        active = transforms()
        if "vmap" in active:
            reasons.append("under vmap its output can't be checked for NaN and Inf")
        if active.count("grad") > 1:
            reasons.append("PyTorch's fused kernels have no second gradient")
    if 0 in n:
        reasons.append(f"a size is 0 ({_zero_sizes(p)}), for which PyTorch has no fused kernel")
    if p.softcap is not None:
        reasons.append("it has no softcap")
    if p.sink is not None:
        reasons.append("it has no sinks")
    if p.dropout_p:
        reasons.append("with dropout PyTorch uses its math path, which stores all weights")
    if n.w != n.d:
        reasons.append(f"PyTorch uses its math path for values of width {n.w} with keys of width {n.d}")
    if any(x.stride(-1) != 1 for x in (p.q, p.k, p.v)):
        reasons.append("PyTorch uses its math path if the last dimension of q, k or v isn't contiguous")
    if p.bias is not None:
        if torch.is_grad_enabled() and p.bias.tensor().requires_grad:
            reasons.append("it computes no gradient of a bias")
        if p.q.dtype in (torch.float16, torch.bfloat16) and not _has_bias_of_same_dtype(p):
            reasons.append(f"it would round the bias to {p.q.dtype}")
    if needs_tensor(p) and not _given_as_tensor(p):
        size = _mask_bytes(p)
        if size > LIMIT:
            reasons.append(
                f"the mask and bias would have to be stored as a tensor of {size / 2**20:,.0f} MiB "
                f"(at most {LIMIT // 2**20})"
            )
    if p.q.device.type == "cuda":
        reasons += _why_unsupported_on_cuda(p)
    return reasons


def _why_unsupported_on_cuda(p: Problem) -> list[str]:
    """Return why PyTorch's CUDA kernels don't support this problem.

    The one that supports float32 and mask tensors doesn't support grouped heads.
    """
    reasons = []
    if p.q.dtype == torch.float64:
        reasons.append("PyTorch has no fused kernel for float64 on CUDA")
    if p.shape.d > 256:
        reasons.append(f"head size {p.shape.d} is above 256")
    if p.shape.h != p.shape.g and (p.q.dtype == torch.float32 or needs_tensor(p)):
        reasons.append("with grouped heads PyTorch fuses only 16-bit problems without a mask tensor on CUDA")
    return reasons


def run(problem: Problem) -> tuple[Tensor, None]:
    """Return the output `[b, h, t, w]`; no log-sum-exp."""
    p, n = problem, problem.shape
    tensor, causal = None, False
    if needs_tensor(p):
        tensor = _build_tensor(p)
        if not can_read(p.q) or p.q.device.type != "cpu":
            p = p.without_masked_keys(tensor if p.bias is None else tensor != -math.inf)
    elif not _is_fully_visible(p):
        causal = True  # queries attend to the first t keys at most, so the other keys are left out
        p = replace(p, k=p.k[:, :, : n.t], v=p.v[:, :, : n.t])
    grouped = False
    if n.h != n.g:  # while tracing, the comparison is symbolic; the branch makes it a bool
        grouped = True
    out = F.scaled_dot_product_attention(
        p.q, p.k, p.v, attn_mask=tensor, is_causal=causal, scale=p.scale, enable_gqa=grouped
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


def _is_causal(p: Problem) -> bool:
    """Return True if the mask is the top-left triangle, which PyTorch calls causal."""
    if p.mask is None or not isinstance(p.offset, int | torch.SymInt) or p.offset != 0:
        return False
    if p.scale <= 0:  # PyTorch multiplies the −inf of its own causal mask by the scale: NaN (2.13, CPU)
        return False
    band, segments, lengths, rest = p.mask.normal()
    return band == (None, 0) and len(segments) + len(lengths) + len(rest) == 0


def _is_fully_visible(p: Problem) -> bool:
    """Return True if the mask is a band that contains all keys of all rows, as Causal for one last query."""
    if p.mask is None:
        return True
    (low, high), segments, lengths, rest = p.mask.normal()
    if len(segments) + len(lengths) + len(rest) > 0:
        return False
    if low is None and high is None:
        return True
    if not isinstance(p.offset, int | torch.SymInt):
        return False
    top, bottom = p.offset, p.offset + p.shape.t - 1
    return (low is None or bottom + low <= 0) and (high is None or top + high >= p.shape.s - 1)


def needs_tensor(p: Problem) -> bool:
    """Return True if the mask and bias have to be passed to PyTorch as a tensor."""
    return p.bias is not None or not (_is_fully_visible(p) or _is_causal(p))


def _given_as_tensor(p: Problem) -> bool:
    """Return True if the caller passed the mask as a tensor."""
    return p.bias is None and isinstance(p.mask, Keep)  # Drop is a subclass


def _mask_bytes(p: Problem) -> int:
    """Return the most bytes that `_build_tensor` needs; a mask may turn out to broadcast over b or h."""
    b, h = 1, 1
    for part in (p.mask, p.bias):
        if part is not None:
            part_b, part_h = p.broadcast_sizes(part)
            b, h = max(b, part_b), max(h, part_h)
    return b * h * p.shape.t * p.shape.s * p.q.element_size()  # PyTorch converts masks to q's dtype


def _has_bias_of_same_dtype(p: Problem) -> bool:
    """Return True if the bias is a tensor of the queries' own dtype."""
    return isinstance(p.bias, Dense) and p.bias.values.dtype == p.q.dtype


def _build_tensor(p: Problem) -> Tensor:
    """Return `attn_mask`: a boolean mask, or a bias to add to the scores, with −inf where masked."""
    n = p.shape
    keep = None if p.mask is None else p.keep(p.mask, ALL, ALL)
    if p.bias is None:
        assert keep is not None
        return keep.expand(keep.shape[0], keep.shape[1], n.t, n.s)
    added = p.bias.add(*p.at(ALL, ALL), p.dtype)
    if keep is not None:
        added = torch.where(keep, added, -math.inf)
    return added.expand(*added.shape[:2], n.t, n.s).to(p.q.dtype)


def _zero_sizes(p: Problem) -> str:
    return ", ".join(letter for letter, size in p.shape._asdict().items() if size == 0)
