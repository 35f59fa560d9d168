"""Attention as functions: the output, the output with its map, and which kernels support a problem."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from manyheads import kernels
from manyheads.biases import Bias
from manyheads.kernels import plans
from manyheads.maps import AttentionMap
from manyheads.masks import Mask
from manyheads.problem import Problem
from manyheads.shapes import kind
from manyheads.statistics import Pass, Reduction, make_reductions


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    offset: int | Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Compute softmax(softcap(scale · q·k) + bias + mask) · v with the fastest kernel for the inputs.

    This is scaled dot-product attention (Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1), with the
    softcap of Gemma 2 (Gemma Team 2024, arXiv:2408.00118) and attention sinks (Xiao et al. 2024,
    arXiv:2309.17453).

    Args:
        q: The queries `[b, h, t, d]`.
        k: The keys `[b, g, s, d]`. g divides h, and query head i uses key head i // (h/g).
        v: The values `[b, g, s, w]`.
        mask: The mask (True = may attend): `Causal()`, `Keep(t)`, … PyTorch's boolean `attn_mask` is
            `Keep(t)`.
        bias: The bias that is added to the scores: `ALiBi`, `Relative` or `Dense`. PyTorch's `attn_mask` of
            numbers is `Dense(t)`.
        scale: The factor by which q·k is multiplied, 1/√d if None.
        softcap: If given, scores become softcap · tanh(score / softcap).
        sink: A logit per head, `[h]`: its exponential is added only to the softmax's denominator.
        dropout_p: The probability with which a weight is dropped. The others are scaled by 1/(1 − p).
        offset: The position of row 0, an int or a tensor `[b]`, between −2^58 and 2^58; s − t if None, so
            that the last query has the position of the last key. PyTorch's `is_causal` is `mask=Causal()`
            and `offset=0`.
        kernel: "auto", or the name of a kernel, which raises an error if it doesn't support the problem.
            `explain` prints the reasons. Second derivatives need "reference".

    Returns:
        The output `[b, h, t, w]`, in the dtype of q. A query without visible keys gets zeros.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If shapes, dtypes, devices or numbers don't fit each other, or the kernel doesn't support
            the problem.
    """
    if has_torch_function_variadic(q, k, v):
        return handle_torch_function(
            attention, (q, k, v), q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink,
            dropout_p=dropout_p, offset=offset, kernel=kernel,
        )  # fmt: skip
    layout = plans.layout(q, k, v, mask, bias, scale, softcap, sink, dropout_p, offset, kernel)
    call = plans.find(layout)
    if call is not None:
        return call(q, k, v, mask)
    q, k, v = autocast(q, k, v)
    problem = Problem.of(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink,
                         dropout_p=dropout_p, offset=offset)  # fmt: skip
    if layout is not None:
        plans.remember(layout, problem, kernel)
    return kernels.run(problem, kernel).out


def attention_with_map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    offset: int | Tensor | None = None,
    kernel: str = "auto",
    statistics: Mapping[str, Any] | None = None,
) -> tuple[Tensor, AttentionMap]:
    """Compute attention, and return the output with its map.

    The map recomputes weights from q, k and the log-sum-exp of each row (Dao et al. 2022, arXiv:2205.14135).
    The output equals that of `attention`, but if t is small, its last bits may differ if statistics or
    gradients are needed: the kernel then sums the scores in a different order.

    Args:
        q: The queries `[b, h, t, d]`.
        k: The keys `[b, g, s, d]`. g divides h, and query head i uses key head i // (h/g).
        v: The values `[b, g, s, w]`.
        mask: The mask (True = may attend): `Causal()`, `Keep(t)`, …
        bias: The bias that is added to the scores: `ALiBi`, `Relative` or `Dense`.
        scale: The factor by which q·k is multiplied, 1/√d if None.
        softcap: If given, scores become softcap · tanh(score / softcap).
        sink: A logit per head, `[h]`: its exponential is added only to the softmax's denominator.
        dropout_p: The probability with which a weight is dropped. The others are scaled by 1/(1 − p).
        offset: The position of row 0, an int or a tensor `[b]`, between −2^58 and 2^58; s − t if None, so
            that the last query has the position of the last key. PyTorch's `is_causal` is `offset=0`.
        kernel: "auto", or the name of a kernel, which raises an error if it doesn't support the problem.
            `explain` prints the reasons. Second derivatives need "reference".
        statistics: Statistics to compute in the same pass, which takes less time than computing them from the
            map, by name and with the arguments of `AttentionMap.statistics`: `{"entropy": (), "received": (),
            "top": 8, "pooled": [(512, 512), (512, 512, "max")]}`. `amap.entropy()` then returns the result.

    Returns:
        The output `[b, h, t, w]` and the map `[b, h, t, s]`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If shapes, dtypes, devices or numbers don't fit each other, or the kernel doesn't support
            the problem, or a statistic is unknown or can't be computed in the same pass.
    """
    if has_torch_function_variadic(q, k, v):
        return handle_torch_function(
            attention_with_map, (q, k, v), q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap,
            sink=sink, dropout_p=dropout_p, offset=offset, kernel=kernel, statistics=statistics,
        )  # fmt: skip
    reductions = make_fusible(statistics)
    q, k, v = autocast(q, k, v)
    problem = Problem.of(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink,
                         dropout_p=dropout_p, offset=offset)  # fmt: skip
    compiling = torch.compiler.is_compiling()
    fused_pass = None
    if reductions and not compiling:
        fused_pass = Pass(problem.detach().without_values(), list(reductions.values()))
    result = kernels.run(problem, kernel, None if fused_pass is None else fused_pass.spec)
    lse, computed = result.lse_of_map(problem), {}
    if fused_pass is not None:
        lse = kernels.statistics(problem).lse if lse is None else lse.detach()
        computed = dict(zip(reductions, fused_pass.results(lse, result.fused or {}), strict=True))
    amap = AttentionMap.of(problem, lse)
    if not compiling and (problem.q.is_inference() or problem.k.is_inference()):
        # In inference mode, PyTorch doesn't track in-place changes, so the map needs copies of q and k.
        amap = amap.compact(always=True)
    return result.out, amap.keeping(computed) if computed else amap


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    offset: int | Tensor | None = None,
    kernel: str = "auto",
) -> dict[str, list[str]]:
    """Print which kernels support a problem, why the others don't, and the cost of a map; compute nothing.

    Args:
        q: The queries `[b, h, t, d]`.
        k: The keys `[b, g, s, d]`. g divides h, and query head i uses key head i // (h/g).
        v: The values `[b, g, s, w]`.
        mask: The mask (True = may attend): `Causal()`, `Keep(t)`, …
        bias: The bias that is added to the scores: `ALiBi`, `Relative` or `Dense`.
        scale: The factor by which q·k is multiplied, 1/√d if None.
        softcap: If given, scores become softcap · tanh(score / softcap).
        sink: A logit per head, `[h]`: its exponential is added only to the softmax's denominator.
        dropout_p: The probability with which a weight is dropped. The others are scaled by 1/(1 − p).
        offset: The position of row 0, an int or a tensor `[b]`, between −2^58 and 2^58; s − t if None, so
            that the last query has the position of the last key. PyTorch's `is_causal` is `offset=0`.
        kernel: "auto" or the name of a kernel. It is checked, but doesn't change the result.

    Returns:
        By the name of each kernel, the reasons why it doesn't support the problem; an empty list if it does.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If shapes, dtypes, devices or numbers don't fit each other, or the kernel is unknown.
    """
    q, k, v = autocast(q, k, v)
    problem = Problem.of(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink,
                         dropout_p=dropout_p, offset=offset)  # fmt: skip
    print(kernels.table(problem))
    if kernel != "auto":
        kernels.load(kernel)
    return kernels.verdicts(problem)


def make_fusible(statistics: Mapping[str, Any] | None) -> dict[tuple[Any, ...], Reduction]:
    """Return the requested statistics by key.

    Args:
        statistics: The arguments of each statistic by its name.

    Returns:
        The reductions by their keys.

    Raises:
        TypeError: If statistics aren't a dict, or arguments don't match the statistic.
        ValueError: If a statistic is unknown or can't be computed in the same pass as the output.
    """
    if statistics is not None and not isinstance(statistics, Mapping):
        raise TypeError(
            f'Expected statistics to be a dict, {{"entropy": (), "top": 8}}, got {kind(statistics)}.'
        )
    for name in ("mass", "value_norms"):
        if name in (statistics or {}):
            raise ValueError(
                f"{name} takes a mask or tensor, which may change later, so it can't be computed in the same "
                f"pass. Call amap.{name}(…)."
            )
    reductions = chain.from_iterable(make_reductions(statistics or {}).values())
    return {reduction.key(): reduction for reduction in reductions}


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as PyTorch's own attention casts them under autocast."""
    if not torch._C._is_any_autocast_enabled():
        return q, k, v
    device = q.device.type if isinstance(q, Tensor) else "meta"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in (q, k, v)
    )
    return q, k, v
