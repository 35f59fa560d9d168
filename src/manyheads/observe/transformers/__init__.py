"""How `observe` sees the models of Hugging Face transformers: it stands behind their two interfaces.

A module of transformers asks `ALL_ATTENTION_FUNCTIONS` for the function that computes its attention, and
a model asks `ALL_MASK_ATTENTION_FUNCTIONS` for the one that makes its masks. While a model is attached,
both still answer with the model's own functions, but watched: what a mask function was asked for is
remembered beside what it made (`masks`), and what an attention function gets is read as a `Problem`
(`calls`). No config is touched: models branch on the name of their implementation, and under another
name would compute something else.

Nothing is guessed. A mask becomes a value, `Causal() & Lengths(…)`, only where it agrees with the tensor
that the kernel gets, entry by entry; elsewhere the tensor itself is the mask. And of every call a few
rows are computed by the formula and compared with what the model's own kernel computed: a call that was
misread raises.

The model's own kernel computes its output. One exception: softcaps and sinks leave a model nothing but its
eager kernel, and where that would build more than 2 GiB of weights (`calls.ROOM`), ours computes instead.
A query that may see nothing, as padding on the left, has weights of zero here, where eager attention
spreads its weight evenly over all keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from typing import Any

from torch import Tensor, nn

from manyheads.observe import attend
from manyheads.observe.transformers.calls import Call, Kernel, name_of
from manyheads.observe.transformers.masks import remembering

OLDEST = (5, 21)  # the oldest with which the tests pass: before it, observing Gemma 2 fails

_lock = RLock()
_attached: Counter[nn.Module] = Counter()
_undo: list[Callable[[], None]] = []


def present(model: nn.Module) -> bool:
    """Is any part of the model one of transformers? Asked without importing it."""
    return any(
        base.__module__.startswith("transformers.") for part in model.modules() for base in type(part).__mro__
    )


@contextmanager
def attached(model: nn.Module) -> Iterator[None]:
    """Watch the attention of a model of transformers: its calls reach `observe.attend`.

    Nests, with the same model or another, in this thread or another; with the last one everything is as
    it was. Models that aren't attached run as if nothing were.

    Raises ImportError where transformers is older than 5.21.
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


def _install() -> None:
    """Put ours before the methods by which transformers looks up its functions."""
    import transformers
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"observing a model of transformers takes version {'.'.join(map(str, OLDEST))} or later, and "
            f"{transformers.__version__} is installed: upgrade it."
        )
    shared, choose = AttentionInterface.__getitem__, AttentionInterface.get_interface
    mask = AttentionMaskInterface.__getitem__

    def get_interface(self: Any, attn_implementation: str, default: Kernel) -> Kernel:
        return choose(self, attn_implementation, _watched(default, "eager"))

    _swap(AttentionInterface, "get_interface", get_interface)
    _swap(AttentionInterface, "__getitem__", lambda self, key: _watched(shared(self, key)))
    _swap(AttentionMaskInterface, "__getitem__", lambda self, key: remembering(mask(self, key)))


def _swap(cls: type, name: str, new: Callable[..., Any]) -> None:
    if name in vars(cls):
        old = vars(cls)[name]
        _undo.append(lambda: setattr(cls, name, old))
    else:  # inherited
        _undo.append(lambda: delattr(cls, name))
    setattr(cls, name, new)


def _watched(kernel: Kernel, name: str | None = None) -> Kernel:
    """The same attention function, whose calls by attached modules are read and handed to who observes."""

    @wraps(kernel)
    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if (*args, kwargs.get("module"))[0] not in _attached:
            return kernel(*args, **kwargs)
        call = Call.of(kernel, name or name_of(kernel), args, kwargs)
        problem = call.problem()
        weights: Tensor | None = None

        def own() -> Tensor:
            nonlocal weights
            if call.ours(problem):
                return call.compute(problem)
            out, weights = kernel(*args, **kwargs)
            call.agree(problem, out)
            return out

        return attend(problem, own, heads=2), weights  # [b, t, h, w]

    return forward
