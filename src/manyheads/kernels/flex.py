"""PyTorch's FlexAttention: any mask and bias in one fused kernel, on CUDA in half precision.

A mask becomes its `mask_mod`, softcap and bias its `score_mod`: functions of one query and one key,
which are compiled into the kernel (Dong et al. 2024, arXiv:2412.05496). It gives the log-sum-exp and every
gradient, and never waits for the device. Masked NaN can't leak only from keys that no query attends to.

The first problem of a kind is compiled, which takes seconds. Problems that differ in numbers and lengths only
are of one kind.
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
GIVES_LSE = True
SHIELDS = False

TRITON = find_spec("triton") is not None
CAPABILITY = (8, 0)  # of the oldest GPUs that multiply bfloat16
NARROW, WIDE = 16, 256  # head sizes that PyTorch's Triton kernel has blocks for
FAR = 1 << 30  # positions are 32-bit integers in it
RUNS = 64  # of adjacent keys; each is a comparison in the kernel
KINDS = 256  # kinds of problems compiled before PyTorch gives up; its own limit of 8 is one model's

Index = Any  # of one pair: a tensor without dimensions


def refuse(problem: Problem) -> list[str]:
    """Return why FlexAttention doesn't support this problem with a fused kernel; empty if it does."""
    p, n = problem, problem.shape
    reasons = _refuse_machine(p.q.device)
    if p.q.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"it computes in float16 and bfloat16, and q is {p.q.dtype}")
    if p.forward_mode():
        reasons.append("it has no forward-mode derivative")
    if not torch.compiler.is_compiling() and "vmap" in transforms():
        reasons.append("it doesn't support vmap")
    if p.dropout_p:
        reasons.append("it has no dropout")
    if 0 in n:
        empty = ", ".join(letter for letter, size in n._asdict().items() if size == 0)
        reasons.append(f"a size is 0 ({empty}), for which PyTorch has no fused kernel")
    for what, size in (("head size", n.d), ("width of values", n.w)):
        if size and not NARROW <= size <= WIDE:
            reasons.append(f"{what} {size} is not between {NARROW} and {WIDE}")
    for part in (p.mask, p.bias, p.offset):
        if _is_far(part):
            reasons.append(f"its positions are 32-bit integers, and {part} needs more")
    leaves = _leaves(p.mask)
    for keys in (leaf for leaf in leaves if isinstance(leaf, Keys)):
        if len(_runs(keys)) > RUNS:
            reasons.append(
                f"it compares with each run of keys, and Keys has {len(_runs(keys))} (at most {RUNS})"
            )
    if not reasons and not torch.compiler.is_compiling():  # last, as it calls the caller's code
        for rule in (leaf for leaf in leaves if isinstance(leaf, Rule)):
            reasons += _refuse_rule(rule, p.q.device)
    return reasons


def run(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the output `[b, h, t, w]` and the log-sum-exp `[b, h, t]`."""
    problem = _per_pair(problem)
    if torch.compiler.is_compiling():
        return _attend(problem)
    try:
        with torch.compiler.config.patch(recompile_limit=KINDS):  # type: ignore[attr-defined]
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
    """Return `_attend` as one graph; without `fullgraph` a graph break would silently build every weight."""
    return torch.compile(_attend, fullgraph=True)


def _attend(p: Problem) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's results. Uncompiled, as the CPU's tests call it, PyTorch builds every weight."""
    n = p.shape
    blocks = None
    if p.mask is not None:
        # In one graph with the mask's own code, so that the `[t, s]` booleans that it counts are
        # computed inside the counting, never stored, and nothing is read back from the device.
        b, h = p.keep(p.mask, slice(0, 1), slice(0, 1)).shape[:2]  # 1 where the mask is the same for all
        blocks = create_block_mask(_mask_mod(p, p.mask), b, h, n.t, n.s, device=p.q.device)
    keep = _keep(p)
    if keep is not None:
        p = p.without_masked_keys(keep)
    out, aux = flex_attention(
        p.q,
        p.k,
        p.v,
        score_mod=_score_mod(p),
        block_mask=blocks,
        scale=_constant(p.scale),
        enable_gqa=n.h != n.g,
        kernel_options={"num_stages": 1} if _reads_tiles(p) else None,
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None
    return (out, aux.lse) if p.sink is None else _join(out, aux.lse, p.sink.to(p.dtype))


# -- the problem as FlexAttention's functions ------------------------------------------------------


def _mask_mod(p: Problem, mask: Mask) -> Callable[..., Tensor]:
    """Return the function that is True where the query in row i may attend to key j."""
    position = _position(p)

    def mask_mod(b: Index, h: Index, i: Index, j: Index) -> Tensor:
        kept = mask.keep(b, h, position(b, i), j)
        return kept if isinstance(kept, Tensor) else (j == j) & kept  # a rule may return True

    return mask_mod


def _score_mod(p: Problem) -> Callable[..., Tensor] | None:
    """Return the function of a score before the mask, scale · q·k, that adds softcap and bias."""
    if p.softcap is None and p.bias is None:
        return None
    dtype, bias, position = p.dtype, p.bias, _position(p)
    cap = None if p.softcap is None else _constant(p.softcap)
    table = bias.tensor() if isinstance(bias, Dense) else None  # [b or 1, h or 1, t or 1, s or 1]

    def score_mod(score: Tensor, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        score = score.to(dtype)
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if bias is None:
            return score
        if table is None:
            added = bias.add(b, h, position(b, i), j, dtype)
        else:  # by row, and at a place without dimensions
            places = zip(table.shape, (b, h, i, j), strict=True)
            added = table[tuple(torch.zeros_like(x) if n == 1 else x for n, x in places)].to(dtype)
        return torch.where(added == -math.inf, -math.inf, score + added)

    return score_mod


def _position(p: Problem) -> Callable[[Index, Index], Index]:
    """Return the function that gives the position of the query in row i of batch entry b."""
    offset = p.offset
    return lambda b, i: i + (offset[b] if isinstance(offset, Tensor) else offset)


def _per_pair(p: Problem) -> Problem:
    """Return the same problem with a mask and bias that can be evaluated for one pair."""
    mask, bias = p.mask, p.bias
    if mask is not None:
        mask = _without_lists(mask, p.shape.s)
    if isinstance(bias, Dense):
        values = bias.values[(None,) * (4 - bias.values.dim())]  # [b or 1, h or 1, t or 1, s or 1]
        bias = bias.but(values=values)
    return replace(p, mask=mask, bias=bias)


def _without_lists(mask: Mask, s: int) -> Mask:
    """Return the same mask with comparisons instead of lists of keys, which would have to be searched."""
    if isinstance(mask, Keys):
        found: Mask = Prefix(0)
        for start, stop in _runs(mask):
            if start < s:
                found = Or(found, And(Prefix(min(stop, s)), Not(Prefix(start))))
        return found
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


def _constant(x: float) -> float:
    """Return a number as a constant: the compiler makes an input of one that changes between calls."""
    return float.fromhex(x.hex())


# -- helpers ---------------------------------------------------------------------------------------


def _keep(p: Problem) -> Tensor | None:
    """Return where mask and bias keep, `[b or 1, h or 1, t or 1, s or 1]`; None if they keep everything."""
    keep = None if p.mask is None else p.keep(p.mask, ALL, ALL)
    if isinstance(p.bias, Dense):
        finite = p.bias.values != -math.inf
        keep = finite if keep is None else keep & finite
    return keep


def _reads_tiles(p: Problem) -> bool:
    """Return True if the kernel loads a number for each pair, and needs shared memory for tiles of them.

    PyTorch loads three tiles ahead; with a float32 bias at head size 64 they don't fit on an H100.
    """
    tables = [leaf.tensor for leaf in _leaves(p.mask) if isinstance(leaf, Keep)]
    if isinstance(p.bias, Dense):
        tables.append(p.bias.values)
    has_rule = any(isinstance(leaf, Rule) for leaf in _leaves(p.mask))  # which may read any tensor
    return has_rule or isinstance(p.bias, Relative) or any(min(x.shape[-2:]) > 1 for x in tables)


def _join(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp with a sink `[h]` in the normalizer."""
    sink = sink[None, :, None]  # [1, h, 1]
    has_keys = lse != -math.inf  # [b, h, t]
    lse = torch.where(has_keys, lse, 0.0)  # −inf − −inf is NaN, in a gradient too
    share = torch.where(has_keys, torch.sigmoid(lse - sink), 0.0)
    out = (out * share[..., None]).to(out.dtype)  # [b, h, t, w]
    return out, torch.where(has_keys, torch.logaddexp(lse, sink), sink)


def _refuse_machine(device: torch.device) -> list[str]:
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


def _is_far(part: Any) -> bool:
    """Return True if a number or a tensor's size in a mask, bias or offset exceeds 32 bits."""
    if isinstance(part, Value):
        return any(_is_far(getattr(part, name)) for name in part.names)
    if isinstance(part, Tensor):
        return part.numel() >= 2 * FAR
    return isinstance(part, int) and not -FAR < part < FAR


def _leaves(mask: Mask | None) -> list[Mask]:
    if mask is None:
        return []
    return [leaf for part in mask.parts() for leaf in _leaves(part)] or [mask]


_REASONS: WeakKeyDictionary[Rule, list[str]] = WeakKeyDictionary()  # why a rule isn't supported

# What a rule may do beside pointwise operations: make numbers, and look them up in a tensor.
LOOK_UP = {"arange", "full", "zeros_like", "ones_like", "full_like", "lift_fresh_copy", "_to_copy", "index",
           "select", "view", "expand", "permute", "unsqueeze", "squeeze", "alias", "detach"}  # fmt: skip


def _refuse_rule(rule: Rule, device: torch.device) -> list[str]:
    """Return why a rule can't be evaluated for one pair without reading from the device; remembered."""
    if rule not in _REASONS:
        try:
            more = sorted(_operators(rule, device) - LOOK_UP)
            why = f"it calls {', '.join(more)}" if more else ""
        except Exception as error:  # whatever the caller's function raises
            why = _first_line(error)
        _REASONS[rule] = [f"{rule} can't be evaluated for one pair ({why})"] if why else []
    return _REASONS[rule]


def _operators(rule: Rule, device: torch.device) -> set[str]:
    """Return the operators, other than pointwise ones, that a rule calls for one pair."""

    def evaluate(b: Index, h: Index, i: Index, j: Index) -> Tensor:
        kept = rule.keep(b, h, i, j)
        if isinstance(kept, Tensor) and kept.dim():
            raise ValueError(f"it returns {sizes(kept)}")
        return (j == j) & kept

    with warnings.catch_warnings(action="ignore"):  # about the speed of this evaluation
        graph = make_fx(lambda: create_mask(evaluate, 1, 1, 1, 1, device))().graph
    called = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return {op.overloadpacket.__name__ for op in called if torch.Tag.pointwise not in op.tags}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0].rstrip(".")
