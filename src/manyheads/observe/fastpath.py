"""The fast path of PyTorch's own transformer layers, in evaluation without gradients.

On it attention is one fused kernel that can't be intercepted; hooks on a layer keep PyTorch from taking it.
An encoder skips padding there, and gives zeros in its place, or what its norm makes of zeros. So that
outputs stay the same under observation, they are computed once more, by the same modules without the hooks.
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
    """Return True for one of these layers with PyTorch's own forward."""
    return any(isinstance(module, layer) and type(module).forward is layer.forward for layer in LAYERS)


def is_taken(module: nn.Module) -> bool:
    """Return True if PyTorch would take the fast path with it now, without hooks."""
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
    """Return True if it, or a module in it, has hooks of a user, which mustn't run twice."""
    return not all(
        _is_from("manyheads.", hook)
        for part in module.modules()
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    )


def without_hooks(module: nn.Module) -> nn.Module:
    """Return a shallow copy of the modules, sharing everything they hold, without the hooks of `observe`."""
    plain = copy(module)
    children = {
        name: None if child is None else without_hooks(child) for name, child in module._modules.items()
    }
    plain.__dict__ |= {"_modules": children}
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = [
            (key, hook)
            for key, hook in getattr(module, name).items()
            if not _is_from("manyheads.observe", hook)
        ]
        plain.__dict__[name] = OrderedDict(hooks)
    return plain
