"""`--like classic.MODULE.CLASS`: the candidate beside our own class of that name, with the same weights."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from manyheads.checker.candidates.adapter import Candidate, Odd
from manyheads.checker.candidates.parameters import Unclear
from manyheads.checker.checks import LOST, Check, failed, passed, skipped
from manyheads.checker.isolation.candidate import Trouble
from manyheads.checker.oracle import allowed, distance

# What each textbook class is called like; the others take modules or heads, and are checked as what they are.
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
    """One of our textbook classes, its kind and its layout."""

    name: str
    kind: str
    layout: str | None
    made: Callable[..., Any]


def of(like: str) -> Classic:
    """The class that `classic.MODULE.CLASS` names; Unclear where there is none."""
    name = like.removeprefix("classic.")
    if name not in CLASSES:
        raise Unclear(f"--like classic.MODULE.CLASS takes {', '.join(CLASSES)}, and {like!r} came.")
    module, _, thing = name.partition(".")
    kind, layout = CLASSES[name]
    return Classic(like, kind, layout, getattr(importlib.import_module(f"manyheads.classic.{module}"), thing))


def compare(c: Candidate, classic: Classic) -> Check:
    """Does the candidate, called as ours is, give what ours gives?"""
    name = f"like {classic.name}"
    if not inspect.isclass(classic.made):
        return skipped(name, "it is a function, compared by its values")
    try:
        bound = inspect.signature(classic.made).bind(**c.init)
        with torch.random.fork_rng(devices=[]):
            ours = cast(nn.Module, classic.made(*bound.args, **bound.kwargs)).eval()
    except TypeError:
        wanted = ", ".join(inspect.signature(classic.made).parameters)
        return skipped(
            name, f"its constructor takes other arguments than {wanted}, so values alone are compared"
        )
    held = dict(ours.named_parameters())
    mine = {path: x for path, x in c.held.items() if path in held} if c.weights is not None else {}
    if set(mine) != set(held) or any(held[path].shape != x.shape for path, x in mine.items()):
        named = ", ".join(f"{path} {list(x.shape)}" for path, x in held.items())
        return failed(name, f"its parameters must be named and shaped as ours: {named}.")
    with torch.no_grad():
        for path, x in mine.items():
            held[path].copy_(x)
    x = c.draw(torch.Generator().manual_seed(51), 2, 5, 7)
    try:
        got = c.run(replace(x, weights=False))
        call = c.call(replace(x, weights=False))
        with torch.no_grad():
            output = ours(*call.args, **call.kwargs)
        want = c.read(output, x)
    except (Odd, TypeError, ValueError) as odd:
        return failed(name, f"it isn't called as ours is: {odd}")
    except Trouble as trouble:
        if trouble.kind in LOST:
            raise
        return failed(name, str(trouble))
    error, most = distance(got.out, want.out), 2 * allowed(c.weights, x)
    return (
        passed(name, "", error, most) if error <= most else failed(name, "it differs from ours.", error, most)
    )
