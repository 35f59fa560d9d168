"""Backward passes under vmap, for kernels that read the memory of tensors.

`torch.autograd.grad(..., is_grads_batched=True)`, `torch.autograd.functional.jacobian(vectorize=True)` and
`torch.vmap` around `torch.autograd.grad` run one backward pass with tensors that represent a whole batch of
gradients and have no memory of their own. PyTorch has two kinds of them: its own functions still use the
older one ("legacy").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

from manyheads.shapes import transforms

Backward = Callable[[Tensor, Tensor | None], Sequence[Tensor]]


def differentiate_unbatched(backward: Backward, d_out: Tensor, d_lse: Tensor | None) -> Sequence[Tensor]:
    """Call a backward pass once for each entry of gradients that vmap has batched, and batch the results.

    Args:
        backward: The backward pass, a function of d_out and d_lse.
        d_out: The gradient of the output, `[b, h, t, w]`.
        d_lse: The gradient of the log-sum-exp, `[b, h, t]` or None.

    Returns:
        The gradients that backward returns. Without vmap it is called once.
    """
    legacy = _functorch.is_legacy_batchedtensor
    if legacy(d_out) or (d_lse is not None and legacy(d_lse)):
        # Leave the innermost vmap, which forbids random numbers.
        level = torch._C._vmapmode_decrement_nesting() + 1
        try:
            return _differentiate_each(backward, d_out, d_lse, level, legacy, torch)
        finally:
            torch._C._vmapmode_increment_nesting()
    if torch.compiler.is_compiling() or not transforms():
        return backward(d_out, d_lse)
    if any(x is not None and _functorch.is_gradtrackingtensor(x) for x in (d_out, d_lse)):
        raise_second_gradient()
    level = _functorch.current_level()

    def is_batched(x: Tensor) -> bool:
        return _functorch.is_batchedtensor(x) and _functorch.maybe_get_level(x) == level

    with temporarily_pop_interpreter_stack():
        return _differentiate_each(backward, d_out, d_lse, level, is_batched, _functorch)


def _differentiate_each(
    backward: Backward,
    d_out: Tensor,
    d_lse: Tensor | None,
    level: int,
    is_batched: Callable[[Tensor], bool],
    api: Any,
) -> Sequence[Tensor]:
    """Call backward for each entry of the tensors that are batched at this level of vmap."""
    if not any(x is not None and is_batched(x) for x in (d_out, d_lse)):
        return differentiate_unbatched(backward, d_out, d_lse)
    entries = zip(
        *(
            api._remove_batch_dim(x, level, 1, 0).unbind() if x is not None and is_batched(x) else repeat(x)
            for x in (d_out, d_lse)
        ),
        strict=False,  # a tensor that isn't batched is the same for every entry
    )
    grads = [differentiate_unbatched(backward, *entry) for entry in entries]
    return [api._add_batch_dim(torch.stack(several), 0, level) for several in zip(*grads, strict=True)]


def raise_second_gradient(ctx: Any = None, *grads: Any) -> Any:
    """Raise the error for the gradient of a gradient."""
    raise RuntimeError(
        "Expected a first gradient of attention, got a second one (a gradient of its gradient), which this "
        'kernel doesn\'t support. Pass kernel="reference" to attention or to the layer: PyTorch can '
        "differentiate it twice."
    )


class OnceDifferentiable(torch.autograd.Function):
    """Compute gradients that are recorded in a graph (`create_graph=True`); its backward raises an error."""

    @staticmethod
    def forward(ctx: Any, backward: Callable[..., Sequence[Tensor]], *args: Any) -> tuple[Tensor, ...]:
        """Return the gradients `backward(*args)`."""
        return tuple(backward(*args))

    backward = staticmethod(raise_second_gradient)
