"""Two functions: the output, and the output with its map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from manyheads.statistics import Pass, Reduction, named


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
    """softmax(scale · q·k → softcap → + bias → keep(mask)) · v, by the best kernel that can.

    Scaled dot-product attention (Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1), with the softcap of
    Gemma 2 (Gemma Team 2024, arXiv:2408.00118) and, as sinks, logits that no key belongs to (Xiao et al.
    2024, arXiv:2309.17453).

    Args:
        q: queries `[b, h, t, d]`.
        k: keys `[b, g, s, d]`; g divides h, query head i uses key head i // (h/g).
        v: values `[b, g, s, w]`.
        mask: which keys a query may see, True = may attend: `Causal()`, `Keep(t)`, …
        bias: what is added to a score: `ALiBi`, `Relative`, `Dense`.
        scale: what multiplies q·k; 1/√d if None.
        softcap: scores become softcap · tanh(score / softcap).
        sink: one logit per head, `[h]`, that joins the normaliser and nothing else.
        dropout_p: the probability with which a weight is dropped; the others grow by 1/(1 − p).
        offset: the position of row 0, an int or one per sequence `[b]`, between −2^58 and 2^58; s − t if
            None, so that the last query stands at the last key. PyTorch's `is_causal` is `offset=0`.
        kernel: "auto", or a kernel by name, which then raises if it can't. `explain` prints why. A second
            gradient needs "reference".

    Returns:
        The output `[b, h, t, w]` in q's dtype. A query that may see nothing gives zeros.

    Raises:
        TypeError: for what is no tensor of floats, mask, bias or number.
        ValueError: for shapes, dtypes, devices or numbers that don't go together.
    """
    if has_torch_function_variadic(q, k, v):
        return handle_torch_function(
            attention, (q, k, v), q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink,
            dropout_p=dropout_p, offset=offset, kernel=kernel,
        )  # fmt: skip
    layout = plans.layout(q, k, v, mask, bias, scale, softcap, sink, dropout_p, offset, kernel)
    call = plans.find(layout)
    if call is not None:
        return call(q, k, v)
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
    """`attention`, and beside its output `[b, h, t, w]` the `AttentionMap`, `[b, h, t, s]`.

    Arguments as `attention`, same errors (TypeError, ValueError), and the same output; with statistics or a
    gradient a few queries sum it in another order, so that the last bits may differ. Kernels that work tile
    by tile leave the log-sum-exp of each row, from which the map finds weights again (Dao et al. 2022,
    arXiv:2205.14135).

    statistics: what will be asked of the map, by name and with arguments as `AttentionMap.statistics` takes
    them: `{"entropy": (), "received": (), "top": 8, "pooled": [(512, 512), (512, 512, "max")]}`. It is
    computed now, by our own kernel beside the output, which costs less than after it, and the map remembers
    it: `amap.entropy()` is free. ValueError for a name that isn't known, and for what takes a mask or a
    tensor, which may change; TypeError for other arguments.
    """
    if has_torch_function_variadic(q, k, v):
        return handle_torch_function(
            attention_with_map, (q, k, v), q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap,
            sink=sink, dropout_p=dropout_p, offset=offset, kernel=kernel, statistics=statistics,
        )  # fmt: skip
    reductions = _reductions(statistics)
    q, k, v = autocast(q, k, v)
    problem = Problem.of(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink,
                         dropout_p=dropout_p, offset=offset)  # fmt: skip
    compiling = torch.compiler.is_compiling()
    out, lse, kept = _run_with_statistics(problem, kernel, {} if compiling else reductions)
    amap = AttentionMap.of(problem, lse)
    if not compiling and (problem.q.is_inference() or problem.k.is_inference()):
        # Nobody counts changes in place there, so a map needs its own numbers.
        amap = amap.compact(always=True)
    return out, replace(amap, _kept=kept) if kept else amap


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
    """Print every kernel with yes or all its reasons, and what a map would cost there.

    Arguments as `attention` (q `[b, h, t, d]`, …), same errors (TypeError, ValueError); nothing is
    computed and no data is looked at. Returns the table as a dict: a kernel's name and its reasons to
    refuse, none if it can.
    """
    q, k, v = autocast(q, k, v)
    problem = Problem.of(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink,
                         dropout_p=dropout_p, offset=offset)  # fmt: skip
    print(kernels.table(problem))
    if kernel != "auto":
        kernels.load(kernel)
    return kernels.verdicts(problem)


def _reductions(statistics: Mapping[str, Any] | None) -> dict[tuple[Any, ...], Reduction]:
    """Return the statistics that can be computed ahead, by their keys."""
    if statistics is not None and not isinstance(statistics, Mapping):
        raise TypeError(
            f'Expected statistics to be a dict, {{"entropy": (), "top": 8}}, got {kind(statistics)}.'
        )
    for name in ("mass", "value_norms"):
        if name in (statistics or {}):
            raise ValueError(
                f"{name} takes what may change before it is read, so it isn't computed ahead: amap.{name}(…)."
            )
    made = named(statistics or {})
    return {one.key(): one for several in made.values() for one in several}


def _run_with_statistics(
    problem: Problem, kernel: str, reductions: dict[tuple[Any, ...], Reduction]
) -> tuple[Tensor, Tensor | None, dict[tuple[Any, ...], Any]]:
    """Return the output, the log-sum-exp of the map if known, and the statistics of the map by their keys."""
    together = Pass(problem.detach().without_values(), list(reductions.values())) if reductions else None
    result = kernels.run(problem, kernel, None if together is None else together.spec)
    lse = result.lse_of_map(problem)
    if together is None:
        return result.out, lse, {}
    lse = kernels.statistics(problem).lse if lse is None else lse.detach()
    return result.out, lse, dict(zip(reductions, together.results(lse, result.found or {}), strict=True))


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as PyTorch's own attention casts them under autocast."""
    if not torch._C._is_any_autocast_enabled():
        return q, k, v
    device = q.device.type if isinstance(q, Tensor) else "meta"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    low = torch.get_autocast_dtype(device)
    q, k, v = (
        x.to(low) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in (q, k, v)
    )
    return q, k, v
