"""`--like classic.MODULE.CLASS`: compare a candidate with a class of `manyheads.classic`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from manyheads.checker.candidates.adapter import Adapter
from manyheads.checker.candidates.errors import Unclear, UnexpectedOutput
from manyheads.checker.checks.registry import Check, failed, judge, skipped
from manyheads.checker.isolation.errors import CodeError
from manyheads.checker.oracle import largest_difference

# The kind and the layout of each class that a candidate can be compared with.
CLASSES: dict[str, tuple[str, str | None]] = {
    "annotated.MultiHeadAttention": ("multihead", "sequence"),
    "components.SelfAttention": ("self", "batch"),
    "components.CrossAttention": ("cross", "batch"),
    "components.attention": ("attention", None),
    "components.PositionalEncoder": ("positional", "batch"),
    "modeling_attention.SelfAttention": ("self", "batch"),
    "modeling_attention.MultiHeadSelfAttention": ("self", "batch"),
    "torch_multihead.MultiheadAttention": ("torch-mha", None),
}


@dataclass(frozen=True)
class Classic:
    """A textbook class of `manyheads.classic`, its kind and its layout."""

    name: str
    kind: str
    layout: str | None
    target: Callable[..., Any]


def find_classic(kind: str) -> Classic:
    """Return a textbook class.

    Args:
        kind: Its name, as "classic.MODULE.CLASS".

    Returns:
        The class, its kind and its layout.

    Raises:
        Unclear: If there is no such class.
    """
    name = kind.removeprefix("classic.")
    if name not in CLASSES:
        raise Unclear(f"Expected --like classic.MODULE.CLASS with one of {', '.join(CLASSES)}, got {kind!r}.")
    module, _, attribute = name.partition(".")
    target = getattr(importlib.import_module(f"manyheads.classic.{module}"), attribute)
    return Classic(kind, *CLASSES[name], target)


def compare_with_classic(adapter: Adapter, classic: Classic) -> Check:
    """Compare the candidate's parameters and output with those of our class, with equal weights."""
    if not inspect.isclass(classic.target):
        return skipped("it is a function, compared by its values")
    try:
        bound = inspect.signature(classic.target).bind(**adapter.init)
        with torch.random.fork_rng(devices=[]):
            ours = cast(nn.Module, classic.target(*bound.args, **bound.kwargs)).eval()
    except TypeError:
        expected = ", ".join(inspect.signature(classic.target).parameters)
        return skipped(f"its constructor takes other arguments than {expected}, so only values are compared")
    parameters = dict(ours.named_parameters())
    weights = adapter.candidate.weights()
    if any(path not in weights or weights[path].shape != x.shape for path, x in parameters.items()):
        listed = ", ".join(f"{path} {list(x.shape)}" for path, x in parameters.items())
        return failed(f"its parameters must have our names and shapes: {listed}.")
    x = adapter.draw(torch.Generator().manual_seed(51), 2, 5, 7).but(need_weights=False)
    try:
        got, call = adapter.run(x), adapter.call(x)
        ours.load_state_dict({path: weights[path] for path in parameters}, strict=False)
        with torch.no_grad():
            right = adapter.read(ours(*call.args, **call.kwargs), x)
    except (UnexpectedOutput, TypeError, ValueError) as raised:
        return failed(f"it isn't called as ours is: {raised}")
    except CodeError as raised:
        return failed(str(raised))
    error = largest_difference(got.out, right.out)
    return judge(error, 2 * adapter.allowed_error(x), "", "it differs from ours.")
