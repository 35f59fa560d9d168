"""Two functions: the output, and the output with its map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manyheads import kernels
from manyheads.biases import Bias
from manyheads.maps import AttentionMap
from manyheads.masks import Mask
from manyheads.scores import Problem


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
        offset: the position of row 0, an int or one per sequence `[b]`; s − t if None, so that the
            last query stands at the last key. PyTorch's `is_causal` is `offset=0`.
        kernel: "auto", or a kernel by name, which then raises if it can't. `explain` prints why.

    Returns:
        The output `[b, h, t, w]` in q's dtype. A query that may see nothing gives zeros.

    Raises:
        TypeError, ValueError: in one sentence, with the caller's own values.
    """
    problem = _problem(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink,
                       dropout_p=dropout_p, offset=offset)  # fmt: skip
    return kernels.run(problem, kernel)[0]


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
) -> tuple[Tensor, AttentionMap]:
    """`attention`, and beside its output the `AttentionMap`. Same arguments, same output."""
    problem = _problem(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink,
                       dropout_p=dropout_p, offset=offset)  # fmt: skip
    out, lse = kernels.run(problem, kernel)
    return out, AttentionMap.of(problem, lse)


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

    Same arguments as `attention`; nothing is computed and no data is looked at. Returns the table as
    a dict: a kernel's name and its reasons to refuse, none if it can.
    """
    problem = _problem(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink,
                       dropout_p=dropout_p, offset=offset)  # fmt: skip
    print(kernels.table(problem))
    if kernel != "auto":
        kernels.load(kernel)
    return kernels.verdicts(problem)


def _problem(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Problem:
    """The problem, with q, k and v cast as PyTorch's own attention casts them under autocast."""
    if isinstance(q, Tensor) and q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        low = torch.get_autocast_dtype(q.device.type)
        q, k, v = (
            x.to(low) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
            for x in (q, k, v)
        )
    return Problem.of(q, k, v, **rest)
