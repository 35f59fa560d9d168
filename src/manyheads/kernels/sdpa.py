"""PyTorch's fused attention, for the problems that it computes exactly.

`F.scaled_dot_product_attention` silently falls back to a path that builds every weight; this kernel doesn't
support the problems for which it would. It gives no log-sum-exp. Masked NaN can leak in it, so `kernels.run`
checks its inputs and its output.
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

LIMIT = 64 * 2**20  # bytes of a mask tensor made from a rule


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
        reasons.append(f"a size is 0 ({_zero(p)}), for which PyTorch has no fused kernel")
    if p.softcap is not None:
        reasons.append("it has no softcap")
    if p.sink is not None:
        reasons.append("it has no sinks")
    if p.dropout_p:
        reasons.append("with dropout PyTorch takes its math path, which builds every weight")
    if n.w != n.d:
        reasons.append(f"values of width {n.w} beside keys of width {n.d} take PyTorch's math path")
    if any(x.stride(-1) != 1 for x in (p.q, p.k, p.v)):
        reasons.append("the last dimension of q, k or v isn't contiguous, which takes PyTorch's math path")
    if p.bias is not None:
        if torch.is_grad_enabled() and p.bias.tensor().requires_grad:
            reasons.append("it gives no gradient to a bias")
        if p.q.dtype in (torch.float16, torch.bfloat16) and not _exact(p):
            reasons.append(f"it would round the bias to {p.q.dtype}")
    if needs_tensor(p) and not _given_as_tensor(p):
        size = _mask_bytes(p)
        if size > LIMIT:
            reasons.append(
                f"the mask and bias would have to become a tensor of {size / 2**20:,.0f} MB "
                f"(at most {LIMIT // 2**20})"
            )
    if p.q.device.type == "cuda":
        reasons += _why_unsupported_on_cuda(p)
    return reasons


def _why_unsupported_on_cuda(p: Problem) -> list[str]:
    """Return why CUDA's kernels don't: float32 and mask tensors go to one without grouped heads."""
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
        tensor = _tensor(p)
        if not can_read(p.q) or p.q.device.type != "cpu":
            p = p.without_masked_keys(tensor if p.bias is None else tensor != -math.inf)
    elif not _is_fully_visible(p):
        causal = True  # and no query attends to a key beyond the first t
        p = replace(p, k=p.k[:, :, : n.t], v=p.v[:, :, : n.t])
    grouped = False
    if n.h != n.g:  # a branch, as a compiler wants a bool here and not a symbol
        grouped = True
    out = F.scaled_dot_product_attention(
        p.q, p.k, p.v, attn_mask=tensor, is_causal=causal, scale=p.scale, enable_gqa=grouped
    )
    if not (torch.compiler.is_compiling() or transforms()):
        _forbid_second_gradient(out)
    return out, None


def _forbid_second_gradient(out: Tensor) -> None:
    """Raise our error for the gradient of a gradient; PyTorch's own names an internal operator."""
    node = out.grad_fn
    if node is not None and node.name().startswith("ScaledDotProduct"):  # a forced math path supports it
        node.register_hook(_forbid_gradients_of)


def _forbid_gradients_of(grads: tuple[Tensor | None, ...], _: Any) -> None:
    """Let the gradients' own nodes raise, which exist with `create_graph=True`."""
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
    """Return True if a mask made of bands only keeps everything, as Causal does for a single last query."""
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
    """Return True if PyTorch takes the mask and bias of a problem as a tensor, which has to be built."""
    return p.bias is not None or not (_is_fully_visible(p) or _is_causal(p))


def _given_as_tensor(p: Problem) -> bool:
    """Return True if the caller passed the mask as a tensor."""
    return p.bias is None and isinstance(p.mask, Keep)  # or a Drop, which is one


def _mask_bytes(p: Problem) -> int:
    """Return the bytes at most: a mask may turn out to be the same for all heads or batch entries."""
    b, h = 1, 1
    for part in (p.mask, p.bias):
        if part is not None:
            part_b, part_h = p.broadcast_sizes(part)
            b, h = max(b, part_b), max(h, part_h)
    return b * h * p.shape.t * p.shape.s * p.q.element_size()  # PyTorch makes a boolean mask one of q's dtype


def _exact(p: Problem) -> bool:
    """Return True if the bias is a tensor of the queries' own dtype."""
    return isinstance(p.bias, Dense) and p.bias.values.dtype == p.q.dtype


def _tensor(p: Problem) -> Tensor:
    """Return mask and bias as PyTorch takes them: boolean, or added numbers with −inf where masked."""
    n = p.shape
    keep = None if p.mask is None else p.keep(p.mask, ALL, ALL)
    if p.bias is None:
        assert keep is not None
        return keep.expand(keep.shape[0], keep.shape[1], n.t, n.s)
    added = p.bias.add(*p.at(ALL, ALL), p.dtype)
    if keep is not None:
        added = torch.where(keep, added, -math.inf)
    return added.expand(*added.shape[:2], n.t, n.s).to(p.q.dtype)


def _zero(p: Problem) -> str:
    return ", ".join(letter for letter, size in p.shape._asdict().items() if size == 0)
