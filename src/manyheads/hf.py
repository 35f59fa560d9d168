"""Run models of Hugging Face transformers on manyheads.

    manyheads.hf.register()
    model.set_attn_implementation("manyheads")

`register` adds an attention function and a mask function to transformers' interfaces. The attention function
translates its arguments into those of `manyheads.attention`, with the code by which `observe` reads calls of
transformers (`observe.transformers`). The mask function is needed too: for an attention function without one,
transformers makes no masks, and a causal model would attend to later tokens.

A mask is a value, such as `Causal() & Lengths(…)`; its tensor is made only if the model reads its entries.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from manyheads import kernels
from manyheads.biases import Dense
from manyheads.extras import missing
from manyheads.functional import attention, autocast
from manyheads.kernels import reference
from manyheads.masks import Causal, Keep
from manyheads.observe import intercept
from manyheads.observe.transformers import OLDEST
from manyheads.observe.transformers.calls import (
    SUPPORTED,
    Call,
    Kernel,
    is_causal_by_default,
    supports_sdpa,
)
from manyheads.observe.transformers.masks import Origin, lazy_mask, remember_origins
from manyheads.problem import Problem
from manyheads.scores import disable_autocast
from manyheads.shapes import can_read

NAME = "manyheads"

_PACKED = (
    "Pass position_ids that start at 0 in each sequence, which transformers turns into a mask, without it"
)
# Arguments that change what a call computes, which `attention` doesn't have, and what to do instead.
UNSUPPORTED = {
    "cu_seq_lens_q": _PACKED,
    "cu_seq_lens_k": _PACKED,
    "block_table": 'Use attn_implementation="flash_attention_2" for paged caches',
    "cache": 'Use attn_implementation="paged|eager" or "sdpa" for continuous batching',
    "head_mask": "Ablate heads with manyheads.observe(model, ablate=[(layer, head)])",
    "layer_head_mask": "Ablate heads with manyheads.observe(model, ablate=[(layer, head)])",
}
_EAGER = 'Use attn_implementation="eager"'


def register(name: str = NAME, *, kernel: str = "auto") -> None:
    """Make "manyheads" an attention implementation of transformers.

    Afterwards, `model.set_attn_implementation("manyheads")` and
    `from_pretrained(..., attn_implementation="manyheads")` run a model's attention on `manyheads.attention`.
    Calling it again replaces the kernel of the name. `count` shows that every layer does.

    Args:
        name: The name of the implementation.
        kernel: The kernel that computes it, as in `manyheads.attention`; "reference" has second derivatives.

    Raises:
        ImportError: If transformers isn't installed, or is too old.
        TypeError: If the name isn't a str.
        ValueError: If the name has a meaning in transformers, or the kernel is unknown.
    """
    try:
        import transformers
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ModuleNotFoundError as error:
        raise missing("manyheads.hf", "transformers", "hf") from error
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"manyheads.hf needs transformers {'.'.join(map(str, OLDEST))} or later, and "
            f"{transformers.__version__} is installed. Upgrade it."
        )
    if not isinstance(name, str):
        raise TypeError(f"Expected name to be a str, got {name!r}.")
    words = ("eager", "sdpa", "flash", "flex_attention", "paged|", "/", ":")
    if not name or any(word in name for word in words):
        raise ValueError(
            f"Expected a name without {', '.join(words)}, which have a meaning in transformers, got "
            f'{name!r}. Use "{NAME}".'
        )
    torch.compiler.assume_constant_result(supports_sdpa)  # it marks the function
    AttentionInterface.register(name, _attention_function(kernels.check(kernel)))
    AttentionMaskInterface.register(name, make_mask)


# -- counting calls --------------------------------------------------------------------------------

_lock = threading.Lock()
_counts: list[Calls] = []  # of the open blocks of `count`


@dataclass
class Calls:
    """The calls of attention that ran on manyheads, as `count` gives them.

    Attributes:
        layers: The number of calls of each attention module, by its path in the model; without a model, by
            the name of its class.
        kernels: The number of calls that each kernel computed.
    """

    layers: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    _paths: Mapping[nn.Module, str] = field(default_factory=dict, repr=False)

    @property
    def total(self) -> int:
        """The number of calls."""
        return sum(self.layers.values())

    def _add(self, module: nn.Module, kernel: str) -> None:
        with _lock:
            self.layers[self._paths.get(module, type(module).__name__)] += 1
            self.kernels[kernel] += 1

    def __str__(self) -> str:
        kernels = ", ".join(f"{name} {n}" for name, n in self.kernels.most_common())
        lines = [f"{self.total} calls in {len(self.layers)} layers" + (f" ({kernels})" if kernels else "")]
        return "\n".join([*lines, *(f"  {n:>6}  {path}" for path, n in self.layers.items())])


@contextmanager
def count(model: nn.Module | None = None) -> Iterator[Calls]:
    """Count the attention calls that run on manyheads while the block runs, on every thread.

    Calls inside a compiled graph aren't counted: it contains operators named `manyheads::…` instead.

    Args:
        model: If given, layers are counted by their path in this model.

    Yields:
        The `Calls`, which can be printed.

    Raises:
        TypeError: If the model isn't a torch.nn.Module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"Expected count to get a torch.nn.Module or nothing, got {type(model).__name__}.")
    paths = {} if model is None else {module: path for path, module in model.named_modules()}
    calls = Calls(_paths=paths)
    with _lock:
        _counts.append(calls)
    try:
        yield calls
    finally:
        with _lock:
            _counts[:] = [each for each in _counts if each is not calls]


# -- the attention function ------------------------------------------------------------------------


@cache
def _attention_function(kernel: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the attention function that uses this kernel."""

    def manyheads_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output `[b, t, h, w]`, and the weights `[b, h, t, s]` if the model returns them."""
        options = {
            "dropout": dropout, "scaling": scaling, "is_causal": is_causal, "sliding_window": sliding_window,
            "softcap": softcap, "s_aux": s_aux, "position_bias": position_bias, **kwargs,
        }  # fmt: skip
        call = Call(_KERNELS[kernel], module, query, key, value, attention_mask, options)
        if torch.compiler.is_compiling() or not _can_read(query, attention_mask):
            (q, k, v), arguments = _arguments_without_numbers(call)
            return _merge(attention(q, k, v, **arguments, kernel=kernel)), None
        _check(call)
        (q, k, v), arguments = call.arguments()
        out = attention(q, k, v, **arguments, kernel=kernel)  # [b, h, t, w]
        if _counts:
            _count(module, Problem.of(*autocast(q, k, v), **arguments), kernel)
        weights = _weigh(q, k, v, arguments) if _returns_weights(call) else None
        return _merge(out), weights

    _KERNELS[kernel] = Kernel.of(manyheads_attention, NAME)
    return manyheads_attention


_KERNELS: dict[str, Kernel] = {}  # our attention functions, as `observe.transformers` describes kernels


def _can_read(query: Tensor, mask: Any) -> bool:
    """Return True if the numbers of a call can be read; flex's masks are functions."""
    return can_read(query, mask if isinstance(mask, Tensor) else None)


def _merge(out: Tensor) -> Tensor:
    """Return an output `[b, h, t, w]` as transformers expects it, `[b, t, h, w]`."""
    return out.transpose(1, 2).contiguous()


def _count(module: nn.Module, problem: Problem, kernel: str) -> None:
    """Add a call to the open counts."""
    name = kernels.choose(problem, kernel).NAME
    for calls in list(_counts):
        calls._add(module, name)


def _check(call: Call) -> None:
    """Raise ValueError if a call has an argument that isn't supported."""
    options = call.options
    _check_names(call)
    for name in _options_of_eager(type(call.module).__module__):
        if options.get(name) is not None:
            raise _reject(call, f"its model's own kernel reads {name}, which isn't supported", _EAGER)
    if getattr(call.module, "sinks", None) is not None and options.get("s_aux") is None:
        raise _reject(call, "it has sinks, and didn't pass them as s_aux", _EAGER)
    scaling, window = options["scaling"], options["sliding_window"]
    if isinstance(scaling, Tensor) and scaling.requires_grad and torch.is_grad_enabled():
        raise _reject(call, "its scaling is a learned tensor, whose gradient isn't supported", _EAGER)
    if call.mask is None and window is not None and call.key.shape[2] > window and call.query.shape[2] > 1:
        raise _reject(
            call,
            f"its window is {window}, and it got {call.key.shape[2]} keys without a mask",
            "Make a mask with transformers.masking_utils.create_sliding_window_causal_mask",
        )


def _reject(call: Call, reason: str, fix: str) -> ValueError:
    """Return the error for a call with something that isn't supported."""
    name = type(call.module).__name__
    return ValueError(f"The attention of {name} can't run on manyheads: {reason}. {fix}.")


def _check_names(call: Call) -> None:
    """Raise ValueError for an argument that `attention` doesn't have."""
    for name, hint in UNSUPPORTED.items():
        if call.options.get(name) is not None:
            raise _reject(call, f"{name} isn't supported", hint)


@cache
def _options_of_eager(module: str) -> tuple[str, ...]:
    """Return the unsupported options of a model's own kernels, by the name of its Python module."""
    home = sys.modules.get(module)
    functions = {} if home is None else {name: each for name, each in vars(home).items() if callable(each)}
    names = {
        parameter
        for name, each in functions.items()
        if "eager" in name and "attention" in name
        for parameter in list(signature(each).parameters)[5:]
    }
    return tuple(sorted(names - SUPPORTED - {"kwargs"} - {*UNSUPPORTED}))


def _arguments_without_numbers(call: Call) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Return the arguments of `attention` while tracing, when the entries of a mask can't be read."""
    _check_names(call)
    if call.options.get("output_attentions"):
        raise _reject(
            call, "weights aren't returned while a graph is traced", "Call the model without torch.compile"
        )
    query, key, value = call.query, call.key, call.value
    if query.shape[0] == 1 and key.shape[0] != 1:
        query = query.expand(key.shape[0], -1, -1, -1)  # learned queries, shared by the batch
    mask: Any = None
    bias, position_bias = None, call.options["position_bias"]
    is_causal = call.options["is_causal"]
    if call.mask is None:
        if is_causal is None:
            is_causal = is_causal_by_default(call.module)
        if is_causal and query.shape[2] > 1:
            mask = Causal()
    elif call.mask.dtype == torch.bool:
        mask = Keep(call.mask)
    else:
        bias = call.mask
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    sink = call.options["s_aux"]
    return (query, key, value), {
        "mask": mask,
        "bias": None if bias is None else Dense(bias),
        "scale": call.options["scaling"],
        "softcap": call.options["softcap"],
        "sink": None if sink is None else sink.reshape(query.shape[1]),
        "dropout_p": float(call.options["dropout"]),
        "offset": 0,
    }


# -- weights ---------------------------------------------------------------------------------------


def _returns_weights(call: Call) -> bool:
    """Return True if the model was called with `output_attentions=True`."""
    if call.options.get("output_attentions"):
        return True
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    collected = _active_collector.get()
    return collected is not None and any("attentions" in key for key in collected)


def _weigh(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return the weights `[b, h, t, s]` before dropout, with their gradients."""
    problem = Problem.of(*autocast(q, k, v), **arguments)
    with intercept.paused(q.device), disable_autocast(q.device):
        return reference.weights(problem)[0].to(problem.q.dtype)


# -- the mask function -----------------------------------------------------------------------------


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask that transformers' `sdpa_mask` makes, as a lazy tensor if possible.

    A causal mask is never skipped: modules that only have an eager kernel don't say that they are causal.

    Args:
        batch_size: The batch size b.
        q_length: The number of queries t.
        kv_length: The number of keys s.
        q_offset: The position of the first query.
        kv_offset: The position of the first key.
        mask_function: The function that defines the mask; causal if None.
        attention_mask: The padding, `[b, n]` (True = not padding).
        local_size: The length of a window or chunk.
        allow_is_causal_skip: Not used.
        allow_is_bidirectional_skip: Whether to return None if everything is visible.
        use_vmap: Whether the function is a caller's, which may not support broadcasting.
        device: The device of the mask.
        **kwargs: Other arguments of mask functions, such as the dtype.

    Returns:
        The mask `[b, 1, t, s]` (True = attend), or None if everything is visible.
    """
    from transformers.masking_utils import causal_mask_function, is_tracing, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function

    def make(make_dense: Callable[..., Any] = sdpa_mask) -> Any:
        return make_dense(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap, device=device, **kwargs,
        )  # fmt: skip

    if torch.compiler.is_compiling():
        return make()
    remembering = remember_origins(sdpa_mask)
    # One row is small, and may be passed to a compiled function, which can't read a lazy tensor.
    if (
        use_vmap
        or q_length == 1
        or torch.device(device).type == "meta"
        or torch._C._len_torch_dispatch_stack()
        or (attention_mask is not None and attention_mask.dtype != torch.bool)
        or any(isinstance(x, Tensor) and is_tracing(x) for x in (attention_mask, q_offset))
    ):
        return make(remembering)
    if allow_is_bidirectional_skip and (local_size is None or kv_length < local_size):
        real = attention_mask if attention_mask is None else attention_mask[:, kv_offset:]
        if real is None or (real.shape[1] >= kv_length and bool(real[:, :kv_length].all())):
            return None
    row = q_offset.clone() if isinstance(q_offset, Tensor) else q_offset  # a static cache increments it
    origin = Origin(function, attention_mask, q_length, kv_length, row, kv_offset)

    def make_later() -> Any:
        nonlocal q_offset
        q_offset = row
        return make(remembering)

    lazy = lazy_mask(origin, batch_size, make_later, device)
    return make(remembering) if lazy is None else lazy
