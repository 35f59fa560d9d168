"""Observe models of Hugging Face transformers, through the two interfaces by which they compute attention.

An attention module of transformers looks up its attention function in `ALL_ATTENTION_FUNCTIONS`, and a
model looks up its mask function in `ALL_MASK_ATTENTION_FUNCTIONS`. While a model is attached, both look-ups
return wrapped functions: the arguments of a mask function are stored with the mask that it made (`masks`),
and a call of an attention function is translated into a `Problem` (`calls`). The config isn't changed,
because some models behave differently if the name of their implementation changes.

Nothing is guessed. A mask becomes a value, such as `Causal() & Lengths(…)`, only if that equals the kernel's
mask tensor in every entry; otherwise the tensor itself is the mask. A few rows of every call are also
computed by the formula and compared with the output of the model's own kernel. If they differ, the call was
translated wrongly, and an error is raised.

The model's own kernel computes its output, with one exception: models with softcaps or sinks have only an
eager kernel, and if that would build more than 2 GiB of weights (`calls.MAX_EAGER_BYTES`), manyheads computes
the output. A query without visible keys, for example in left padding, has weights of zero in the map, whereas
eager attention gives all keys the same weight.

A model that runs on manyheads (`manyheads.hf`) calls `attention`, which `intercept` records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from threading import RLock
from typing import Any

from torch import Tensor, nn

from manyheads.observe import intercept
from manyheads.observe.transformers.calls import Call, Function, Kernel
from manyheads.observe.transformers.masks import remember_origins

OLDEST = (5, 21)  # the oldest version with which the tests pass: before it, observing Gemma 2 fails

_lock = RLock()
_attached: Counter[nn.Module] = Counter()
_undo: list[Callable[[], None]] = []


def is_from_transformers(model: nn.Module) -> bool:
    """Return True if any part of the model is from transformers, without importing transformers."""
    return any(
        base.__module__.startswith("transformers.") for part in model.modules() for base in type(part).__mro__
    )


@contextmanager
def attached(model: nn.Module) -> Iterator[None]:
    """Record the attention calls of a model of transformers.

    Blocks may be nested, for the same model or different ones, and run on several threads. The last exit
    undoes every change. Models that aren't attached run as usual. An ImportError is raised if transformers is
    older than `OLDEST`.
    """
    parts = list(model.modules())
    with _lock:
        if not _attached:
            _install()
        _attached.update(parts)
    try:
        yield
    finally:
        with _lock:
            _attached.subtract(parts)
            for part in parts:
                if not _attached[part]:
                    del _attached[part]
            if not _attached:
                while _undo:
                    _undo.pop()()
                _wrap.cache_clear()


def _install() -> None:
    """Replace the methods by which transformers looks up its attention and mask functions."""
    import transformers
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"Observing a model of transformers needs version {'.'.join(map(str, OLDEST))} or later, and "
            f"{transformers.__version__} is installed. Upgrade it."
        )
    look_up, get_interface = AttentionInterface.__getitem__, AttentionInterface.get_interface
    look_up_mask = AttentionMaskInterface.__getitem__

    def get_wrapped(self: Any, attn_implementation: str, default: Function) -> Function:
        return get_interface(self, attn_implementation, _wrap(default, "eager"))

    _replace(AttentionInterface, "get_interface", get_wrapped)
    _replace(AttentionInterface, "__getitem__", lambda self, key: _wrap(look_up(self, key)))
    _replace(
        AttentionMaskInterface, "__getitem__", lambda self, key: remember_origins(look_up_mask(self, key))
    )


def _replace(cls: type, name: str, new: Callable[..., Any]) -> None:
    old = vars(cls).get(name)  # None if it is inherited
    _undo.append(lambda: delattr(cls, name) if old is None else setattr(cls, name, old))
    setattr(cls, name, new)


@cache
def _wrap(function: Function, name: str | None = None) -> Function:
    """Return an attention function whose calls by attached modules are recorded."""
    kernel = Kernel.of(function, name)
    if kernel.name == "manyheads":
        return function  # it calls `attention`, which is intercepted

    @wraps(function)
    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        module = args[0] if args else kwargs.get("module")
        if module not in _attached or not intercept.is_recording():
            return function(*args, **kwargs)
        call = Call.of(kernel, args, kwargs)
        with intercept.paused(call.query.device):
            problem = call.problem()
            if call.is_too_large(problem):
                out, weights = call.compute(problem), None
            else:
                out, weights = function(*args, **kwargs)
                call.compare(problem, out)
            intercept.record(problem)
            return intercept.ablate(out, 2), weights  # [b, t, h, w]

    return forward
