"""PyTorch's own transformer layers, which in evaluation without gradients take a path of their own.

On that path nobody can stand, and hooks keep the layers from it; an encoder even leaves padding out there
and gives zeros in its place, or what its norm makes of them. So that outputs stay what they were, the
output is computed once more, by the same modules without hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import nn

LAYERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def able(module: nn.Module) -> bool:
    """Is it one of these layers, with PyTorch's own forward?"""
    return any(isinstance(module, one) and type(module).forward is one.forward for one in LAYERS)


def takes(module: nn.Module) -> bool:
    """Might PyTorch take the fused path with it now?"""
    if not able(module):
        return False
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in module.parameters())
    one = next(iter(module.layers), module) if isinstance(module, nn.TransformerEncoder) else module
    return not one.training and not graph and torch.backends.mha.get_fastpath_enabled()


def leaves_padding_out(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Would an encoder that takes it leave out padding that came?"""
    if not isinstance(module, nn.TransformerEncoder) or not getattr(module, "use_nested_tensor", False):
        return False
    return kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None) is not None


def hooked(module: nn.Module) -> bool:
    """Has it, or a module in it, hooks that somebody else put there, which mustn't run twice?"""
    return any(
        not getattr(hook, "__module__", "").startswith("manyheads.")
        for one in module.modules()
        for hook in (*one._forward_hooks.values(), *one._forward_pre_hooks.values())
    )


def bare(module: nn.Module) -> nn.Module:
    """The same modules, sharing all that they hold, without the hooks of `observe`."""
    plain = copy(module)
    children = {name: None if child is None else bare(child) for name, child in module._modules.items()}
    plain.__dict__ |= {"_modules": children}
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        kept = {
            key: hook
            for key, hook in getattr(module, hooks).items()
            if not getattr(hook, "__module__", "").startswith("manyheads.observe")
        }
        plain.__dict__[hooks] = OrderedDict(kept)
    return plain
