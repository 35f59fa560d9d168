"""PyTorch's FlexAttention: any mask and bias in one fused kernel, on CUDA in half precision.

A mask becomes a `mask_mod`, softcap and bias a `score_mod`: functions of one query and one key, which are
compiled into the kernel (Dong et al. 2024, arXiv:2412.05496). The kernel returns the log-sum-exp, has all
gradients, and never waits for the device. NaN and Inf in a masked key can affect the output, unless the key
is masked for all queries.

The kernel is compiled for each kind of problem, which takes seconds. Problems that differ only in numbers and
lengths are of the same kind.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention

from manyheads.biases import Dense, Relative
from manyheads.masks import And, Keep, Keys, Mask, Not, Or, Prefix, Rule
from manyheads.problem import ALL, Problem
from manyheads.shapes import sizes, transforms
from manyheads.trees import Value

NAME = "flex"
GIVES_LSE = False  # its log-sum-exp is rounded differently from the scores that maps compute in blocks
SHIELDS = False

TRITON = find_spec("triton") is not None
CAPABILITY = (8, 0)  # compute capability of the oldest GPUs that multiply bfloat16
NARROW, WIDE = 16, 256  # the smallest and largest head size that PyTorch's Triton kernel has blocks for
FAR = 1 << 30  # positions are 32-bit integers in the kernel
MAX_RUNS = 64  # runs of adjacent keys in `Keys`; each is a comparison in the kernel
MAX_KINDS = 256  # kinds of problems that are compiled; PyTorch's default of 8 is enough for one model only

Index = Any  # an index of one pair: a tensor without dimensions


def why_unsupported(problem: Problem) -> list[str]:
    """Return why FlexAttention doesn't support this problem with a fused kernel; empty if it does."""
    shape, device = problem.shape, problem.q.device
    reasons = _why_machine_unsupported(device)
    if problem.q.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"it computes in float16 and bfloat16, and q is {problem.q.dtype}")
    if problem.forward_mode():
        reasons.append("it has no forward-mode derivative")
    if not torch.compiler.is_compiling() and "vmap" in transforms():
        reasons.append("it doesn't support vmap")
    if problem.dropout_p:
        reasons.append("it has no dropout")
    if 0 in shape:
        reasons.append(f"a size is 0 ({shape.zeros()}), for which PyTorch has no fused kernel")
    for name, size in (("head size", shape.d), ("width of values", shape.w)):
        if size and not NARROW <= size <= WIDE:
            reasons.append(f"{name} {size} is not between {NARROW} and {WIDE}")
    for value in (problem.mask, problem.bias, problem.offset):
        if _is_far(value):
            reasons.append(f"its positions are 32-bit integers, and {value} needs more")
    masks = problem.masks()
    for count in (len(_runs(mask)) for mask in masks if isinstance(mask, Keys)):
        if count > MAX_RUNS:
            reasons.append(f"it compares with each run of keys, and Keys has {count} (at most {MAX_RUNS})")
    if not reasons and not torch.compiler.is_compiling():  # last, because it calls the caller's code
        for rule in (mask for mask in masks if isinstance(mask, Rule)):
            reasons += _why_rule_unsupported(rule, device)
    return reasons


def run(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the output `[b, h, t, w]` and the log-sum-exp `[b, h, t]`."""
    problem = _per_pair(problem)
    if torch.compiler.is_compiling():
        return _attend(problem)
    try:
        with torch.compiler.config.patch(recompile_limit=MAX_KINDS):  # type: ignore[attr-defined]
            return _compiled()(problem)
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        raise RuntimeError(
            f"PyTorch couldn't compile FlexAttention for this problem ({_first_line(error)}): "
            'use kernel="chunked".'
        ) from error


@cache
def _compiled() -> Callable[[Problem], tuple[Tensor, Tensor]]:
    """Return `_attend` compiled as one graph: after a graph break PyTorch would compute all weights."""
    return torch.compile(_attend, fullgraph=True)


def _attend(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp. Uncompiled, as in tests on the CPU, PyTorch computes all weights."""
    shape = problem.shape
    blocks = None
    if problem.mask is not None:
        # The block mask is compiled in one graph with the mask, so that the `[t, s]` booleans that it counts
        # are never stored, and nothing is read back from the device.
        b, h = problem.keep(problem.mask, slice(0, 1), slice(0, 1)).shape[:2]  # 1 if all have the same mask
        mask_mod, device = _mask_mod(problem, problem.mask), problem.q.device
        blocks = create_block_mask(mask_mod, b, h, shape.t, shape.s, device=device)
    keep = None if problem.mask is None else problem.keep(problem.mask, ALL, ALL)
    if isinstance(problem.bias, Dense):
        finite = problem.bias.values != -math.inf
        keep = finite if keep is None else keep & finite
    if keep is not None:
        problem = problem.without_masked_keys(keep)
    out, aux = flex_attention(
        problem.q,
        problem.k,
        problem.v,
        score_mod=_score_mod(problem),
        block_mask=blocks,
        scale=_constant(problem.scale),
        enable_gqa=shape.h != shape.g,
        kernel_options={"num_stages": 1} if _reads_tiles(problem) else None,
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None
    return (out, aux.lse) if problem.sink is None else _join(out, aux.lse, problem.sink.to(problem.dtype))


# -- the problem as FlexAttention's functions ------------------------------------------------------


def _mask_mod(problem: Problem, mask: Mask) -> Callable[..., Tensor]:
    """Return the function that is True if the query in row i may attend to key j."""
    position = _position(problem)

    def mask_mod(b: Index, h: Index, i: Index, j: Index) -> Tensor:
        kept = mask.keep(b, h, position(b, i), j)
        return kept if isinstance(kept, Tensor) else (j == j) & kept  # a rule may return True

    return mask_mod


def _score_mod(problem: Problem) -> Callable[..., Tensor] | None:
    """Return the function that applies softcap and bias to a score, scale · q·k; None without them."""
    if problem.softcap is None and problem.bias is None:
        return None
    dtype, bias, position = problem.dtype, problem.bias, _position(problem)
    cap = None if problem.softcap is None else _constant(problem.softcap)
    table = bias.values if isinstance(bias, Dense) else None  # [b or 1, h or 1, t or 1, s or 1]

    def score_mod(score: Tensor, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        score = score.to(dtype)
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if bias is None:
            return score
        if table is None:
            added = bias.add(b, h, position(b, i), j, dtype)
        else:  # `Dense.add` takes positions with dimensions; here i is a row
            indices = zip(table.shape, (b, h, i, j), strict=True)
            added = table[tuple(torch.zeros_like(x) if n == 1 else x for n, x in indices)].to(dtype)
        return torch.where(added == -math.inf, -math.inf, score + added)

    return score_mod


def _position(problem: Problem) -> Callable[[Index, Index], Index]:
    """Return the function that gives the position of the query in row i of batch entry b."""
    offset = problem.offset
    return lambda b, i: i + (offset[b] if isinstance(offset, Tensor) else offset)


def _per_pair(problem: Problem) -> Problem:
    """Return the same problem with a mask and bias that can be evaluated for one pair."""
    mask, bias = problem.mask, problem.bias
    if mask is not None:
        mask = _without_lists(mask, problem.shape.s)
    if isinstance(bias, Dense):
        bias = bias.but(values=bias.values[(None,) * (4 - bias.values.dim())])  # four axes
    return replace(problem, mask=mask, bias=bias)


def _without_lists(mask: Mask, s: int) -> Mask:
    """Return the same mask with lists of keys, which the kernel can't search, replaced by comparisons."""
    if isinstance(mask, Keys):
        keys: Mask = Prefix(0)
        for start, stop in _runs(mask):
            if start < s:
                keys = Or(keys, And(Prefix(min(stop, s)), Not(Prefix(start))))
        return keys
    if isinstance(mask, And | Or):
        return mask.but(left=_without_lists(mask.left, s), right=_without_lists(mask.right, s))
    return mask.but(mask=_without_lists(mask.mask, s)) if isinstance(mask, Not) else mask


def _runs(keys: Keys) -> list[tuple[int, int]]:
    """Return runs of adjacent keys as half-open intervals."""
    runs: list[tuple[int, int]] = []
    for key in keys.keys:
        if runs and runs[-1][1] == key:
            runs[-1] = (runs[-1][0], key + 1)
        else:
            runs.append((key, key + 1))
    return runs


def _constant(number: float) -> float:
    """Return a copy of a number that compiles to a constant, even if the number changes between calls."""
    return float.fromhex(number.hex())


# -- helpers ---------------------------------------------------------------------------------------


def _reads_tiles(problem: Problem) -> bool:
    """Return True if the kernel loads a number for each pair, and needs shared memory for tiles of them.

    PyTorch loads three tiles in advance, which for a float32 bias and head size 64 don't fit on an H100.
    """
    masks, bias = problem.masks(), problem.bias
    tables = [mask.tensor for mask in masks if isinstance(mask, Keep)]
    if isinstance(bias, Dense):
        tables.append(bias.values)
    has_rule = any(isinstance(mask, Rule) for mask in masks)  # a function may read any tensor
    return has_rule or isinstance(bias, Relative) or any(min(table.shape[-2:]) > 1 for table in tables)


def _join(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp with a sink `[h]` in the sum of the softmax."""
    sink = sink[None, :, None]  # [1, h, 1]
    has_keys = lse != -math.inf  # [b, h, t]
    lse = torch.where(has_keys, lse, 0.0)  # −inf − −inf is NaN, in a gradient too
    share = torch.where(has_keys, torch.sigmoid(lse - sink), 0.0)
    out = (out * share[..., None]).to(out.dtype)  # [b, h, t, w]
    return out, torch.where(has_keys, torch.logaddexp(lse, sink), sink)


def _why_machine_unsupported(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return [f"it runs on CUDA, and q is on {device} (where chunked is faster, and gives gradients)"]
    if not TRITON:
        return ["it needs Triton, which isn't installed"]
    if torch.compiler.is_compiling():
        return []
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= CAPABILITY:
        return []
    return [f"it needs a GPU of compute capability 8.0, and {device} has {major}.{minor}"]


def _is_far(value: Any) -> bool:
    """Return True if a number or a tensor's size in a mask, bias or offset exceeds 32 bits."""
    if isinstance(value, Value):
        return any(_is_far(getattr(value, name)) for name in value.names)
    if isinstance(value, Tensor):
        return value.numel() >= 2 * FAR
    return isinstance(value, int) and not -FAR < value < FAR


_REASONS: WeakKeyDictionary[Rule, list[str]] = WeakKeyDictionary()  # why a rule isn't supported

# Operators that a rule may call, besides pointwise ones: they create numbers, or index a tensor.
INDEXING = {"arange", "full", "zeros_like", "ones_like", "full_like", "lift_fresh_copy", "_to_copy", "index",
           "select", "view", "expand", "permute", "unsqueeze", "squeeze", "alias", "detach"}  # fmt: skip


def _why_rule_unsupported(rule: Rule, device: torch.device) -> list[str]:
    """Return why a rule can't be evaluated for one pair without reading from the device. It is cached."""
    if rule not in _REASONS:
        try:
            operators = sorted(_operators(rule, device) - INDEXING)
            reason = f"it calls {', '.join(operators)}" if operators else ""
        except Exception as error:  # the caller's function may raise any
            reason = _first_line(error)
        _REASONS[rule] = [f"{rule} can't be evaluated for one pair ({reason})"] if reason else []
    return _REASONS[rule]


def _operators(rule: Rule, device: torch.device) -> set[str]:
    """Return the operators that a rule calls for one pair, without pointwise ones."""

    def evaluate(b: Index, h: Index, i: Index, j: Index) -> Tensor:
        kept = rule.keep(b, h, i, j)
        if isinstance(kept, Tensor) and kept.dim():
            raise ValueError(f"it returns {sizes(kept)}")
        return (j == j) & kept

    with warnings.catch_warnings(action="ignore"):  # PyTorch warns that this evaluation is slow
        graph = make_fx(lambda: create_mask(evaluate, 1, 1, 1, 1, device))().graph
    called = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return {op.overloadpacket.__name__ for op in called if torch.Tag.pointwise not in op.tags}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0].rstrip(".")
