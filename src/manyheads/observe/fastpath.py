"""The fast path of PyTorch's own transformer layers, in evaluation without gradients.

On the fast path, attention is part of a fused kernel that can't be intercepted. PyTorch doesn't take the fast
path if a layer has hooks. An encoder's fast path also skips padding, and returns zeros for it, or the norm of
zeros. To return the same outputs when the model is observed, they are computed a second time by the same
modules without hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import nn

LAYERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def has_fastpath(module: nn.Module) -> bool:
    """Return True for one of PyTorch's layers with a fast path, unless a subclass changes its forward."""
    return any(isinstance(module, layer) and type(module).forward is layer.forward for layer in LAYERS)


def is_taken(module: nn.Module) -> bool:
    """Return True if PyTorch would take a module's fast path in its current state, but for its hooks."""
    if not has_fastpath(module):
        return False
    layer = next(iter(module.layers), module) if isinstance(module, nn.TransformerEncoder) else module
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in module.parameters())
    return not layer.training and not needs_gradient and torch.backends.mha.get_fastpath_enabled()


def skips_padding(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if the module is an encoder that would skip the padding of this call."""
    if not isinstance(module, nn.TransformerEncoder) or not getattr(module, "use_nested_tensor", False):
        return False
    return kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None) is not None


def _is_from(package: str, hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith(package)


def has_other_hooks(module: nn.Module) -> bool:
    """Return True if a user's hooks, which mustn't run twice, are attached to a module or a part of it."""
    return any(
        not _is_from("manyheads.", hook)
        for part in module.modules()
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    )


def without_hooks(module: nn.Module) -> nn.Module:
    """Return a copy of a module without the hooks of `observe`, which shares the original's parameters."""
    plain = copy(module)
    children = module._modules.items()
    plain._modules = {name: None if child is None else without_hooks(child) for name, child in children}
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = getattr(module, name).items()
        kept = OrderedDict((key, hook) for key, hook in hooks if not _is_from("manyheads.observe", hook))
        setattr(plain, name, kept)
    return plain
