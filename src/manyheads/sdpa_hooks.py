"""Hooks of `torch.nn.functional.scaled_dot_product_attention`, which `observe` and `accelerate` share.

While a hook is set, the name in `torch.nn.functional` refers to a function that calls the hooks, on all
threads. `observe` counts calls that belong to no module, and `accelerate` computes calls in place of PyTorch.
They can begin and end in any order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SDPA = F.scaled_dot_product_attention  # PyTorch's own

_lock = threading.Lock()
_notify: Callable[[], None] | None = None
_compute: Callable[..., Tensor] | None = None
_previous: Callable[..., Tensor] = SDPA  # what ours replaces: another program may have replaced PyTorch's


def set_notify(hook: Callable[[], None] | None) -> None:
    """Call a function without arguments before each call; None to stop."""
    global _notify
    with _lock:
        _notify = hook
        _replace()


def set_compute(hook: Callable[..., Tensor] | None) -> None:
    """Compute each call by a function of the function that ours replaces and the arguments; None to stop."""
    global _compute
    with _lock:
        _compute = hook
        _replace()


def _replace() -> None:
    """Replace PyTorch's function if there is a hook, and put it back if there is none.

    If another program has replaced ours since, it may call ours, which then calls the function before.
    """
    global _previous
    is_ours = F.scaled_dot_product_attention is scaled_dot_product_attention
    has_hook = _notify is not None or _compute is not None
    if has_hook and not is_ours:
        _previous = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = scaled_dot_product_attention
    elif is_ours and not has_hook:
        F.scaled_dot_product_attention = _previous


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Call the hooks, or PyTorch's function. Code may keep a reference to this function."""
    if torch.compiler.is_compiling():
        return SDPA(*args, **kwargs)
    if _notify is not None:
        _notify()
    return compute(*args, **kwargs)


def compute(*args: Any, **kwargs: Any) -> Tensor:
    """Return the output, without counting the call."""
    hook = _compute
    return _previous(*args, **kwargs) if hook is None else hook(_previous, *args, **kwargs)
