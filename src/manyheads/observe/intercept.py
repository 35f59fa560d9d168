"""How attention calls are met: PyTorch's functions on their way, translated into problems.

While a module of an observed model runs, a torch function mode stands between the model and PyTorch.
Of all that passes it stops four kinds of calls, and lets the model's own kernel compute each of them:

    scaled_dot_product_attention        (also as an operator of an exported program)
    multi_head_attention_forward        nn.MultiheadAttention and all that is built on it
    flex_attention                      with a mask_mod, without a score_mod
    a fused kernel called by its name   refused: it says too little to tell its weights

A softmax that passes beside them is noted: it may be attention written out by hand, which isn't seen.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from manyheads import kernels
from manyheads.biases import Dense
from manyheads.functional import autocast
from manyheads.kernels import reference
from manyheads.masks import Causal, Keep, Lengths, Mask, Rule
from manyheads.observe.here import attend, by_hand, check, removing
from manyheads.scores import Problem

LOOKED_FOR = (
    "torch.nn.functional.scaled_dot_product_attention, torch.nn.MultiheadAttention and what is built on it, "
    "flex_attention, Hugging Face's attention interface, and manyheads' own attention"
)


FUSED = (
    "_scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "_native_multi_head_attention",
    "_triton_multi_head_attention",
    "_transformer_encoder_layer_fwd",
)


SOFTMAX = frozenset((F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax))


class Stand(TorchFunctionMode):
    """Stands on the way of every PyTorch function, and stops those that are attention."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handle = _handler(func)
        if handle is None:
            if func in SOFTMAX:
                by_hand(args[0] if args else (kwargs or {}).get("input"))
            return func(*args, **(kwargs or {}))
        return handle(func, *args, **(kwargs or {}))


def _handler(func: Any) -> Callable[..., Any] | None:
    if func is F.multi_head_attention_forward:
        return _multi_head
    name = getattr(func, "__name__", "")
    if "attention" not in name and not name.startswith("_transformer"):
        return None
    base = name.partition(".")[0]
    if base == "scaled_dot_product_attention":
        return _scaled_dot_product
    if base == "flex_attention":
        return _flex
    if base.startswith(FUSED):
        return _by_name
    return None


# -- scaled_dot_product_attention ------------------------------------------------------------------


def _scaled_dot_product(
    func: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest: Any,  # scale, enable_gqa
) -> Tensor:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check(x, f"scaled_dot_product_attention's {name}")
    given = (query, key, value)
    dims = max(x.dim() for x in given)
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in given))
    q, k, v = (_four(x, lead, dims) for x in autocast(*given))
    h = max(q.shape[1], k.shape[1], v.shape[1])
    q = q.expand(-1, h, -1, -1)
    if k.shape[1] != v.shape[1]:
        k, v = (x.repeat_interleave(h // max(x.shape[1], 1), 1) for x in (k, v))
    masks = {}
    if attn_mask is not None:
        entries = _once(_four(attn_mask, lead, dims))
        masks["attn_mask"] = entries.expand(*entries.shape[:3], k.shape[2])
    # PyTorch's is_causal counts from the top left. Without it more keys than queries are a cache, and a
    # triangle in the mask says where the queries stand; else the last key is taken for the last query's.
    # (Or the keys are another sequence's, where positions mean nothing.)
    offset = 0 if is_causal else max(k.shape[2] - q.shape[2], 0)
    if masks and offset:
        offset = triangle(shown(masks["attn_mask"]), q.shape[2], offset)
    mask, bias = translate(masks, shows=True, offset=offset, t=q.shape[2])
    if is_causal:
        mask = Causal() if mask is None else Causal() & mask
    said: dict[str, Any] = {"scale": rest.get("scale"), "dropout_p": dropout_p, "offset": offset}
    problem = Problem.of(q, k, v, mask=mask, bias=bias, **said)
    shape: list[torch.Size] = []

    def own() -> Tensor:
        out = func(query, key, value, attn_mask, dropout_p, is_causal, **rest)
        shape.append(out.shape)
        return out.reshape(*q.shape[:3], out.shape[-1])

    return attend(problem, own).reshape(shape[0])


def _four(x: Tensor, lead: torch.Size, dims: int) -> Tensor:
    """`[..., h, t, d]` as `[b, h, t, d]`, b being all of `lead`; in a call of fewer dimensions h is 1."""
    if dims < 4:
        return x[(None,) * (3 - x.dim())][:, None]
    x = x[(None,) * (4 - x.dim())]
    return x.expand(*lead, *x.shape[-3:]).flatten(0, -4)


def _once(mask: Tensor) -> Tensor:
    """A mask without the repetitions of an expanded tensor: there its axis is 1."""
    for axis in range(3):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, min(mask.shape[axis], 1))
    return mask


# -- masks as tensors ------------------------------------------------------------------------------


def translate(
    masks: dict[str, Tensor], *, shows: bool, offset: int = 0, t: int | None = None
) -> tuple[Mask | None, Dense | None]:
    """Tensors that broadcast to `[b, h, t, s]` as a mask and a bias.

    Booleans are masks: True = may attend if `shows`, hidden if not. Floats are added to the scores;
    −inf hides, and so does the lowest number of the dtype, with which models write −inf.
    """
    mask: Mask | None = None
    bias: Tensor | None = None
    for name, tensor in masks.items():
        tensor = tensor.detach()
        if tensor.dtype != torch.bool and not tensor.is_floating_point():
            raise TypeError(f"{name} must be boolean or of floats, and {tensor.dtype} came.")
        kept = shown(tensor) if shows or tensor.is_floating_point() else ~tensor
        if tensor.is_floating_point():
            if not bool((tensor < torch.inf).all()):
                raise ValueError(f"{name} may hold numbers and -inf (hidden), and NaN or +inf came.")
            added = torch.where(kept, tensor, 0.0)
            # A softmax doesn't change with what a whole row is given alike, such as -1e9 on padding, but
            # beside a number of that size the scores would be rounded away.
            alike = torch.where(kept, tensor, -torch.inf).amax(-1, keepdim=True)
            added = torch.where(kept & (alike.abs() > 1000), tensor - alike, added)
            if bool((added != 0).any()):
                bias = added if bias is None else bias + added
        part = known(kept.clone() if kept.is_inference() else kept, offset, t)
        if part is not None:
            mask = part if mask is None else mask & part
    return mask, None if bias is None else Dense(bias)


def shown(mask: Tensor) -> Tensor:
    """Where a boolean or additive mask lets a query see."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask must be boolean or of floats, and {mask.dtype} came.")
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def triangle(kept: Tensor, t: int, otherwise: int) -> int:
    """The position of the first of t queries, if their mask `[…, t, s]` is a triangle that says so."""
    n = int(kept.flatten(0, -2)[0].sum()) if kept.numel() else 0
    says = n > 0 and kept.shape[-2] == t and torch.equal(kept, torch.ones_like(kept).tril(n - 1))
    return n - 1 if says else otherwise


def known(kept: Tensor, offset: int = 0, t: int | None = None) -> Mask | None:
    """The mask that a boolean tensor `[b or 1, h or 1, t or 1, s]` spells, True = may attend.

    offset is the position of the first of t queries.

    None for one that keeps everything, `Causal` and `Lengths` where that is what it says, else `Keep`:
    a value takes no room, and can be drawn, joined with the next step's, and saved.
    """
    if bool(kept.all()):
        return None
    b, h, rows, s = kept.shape
    # A single row is a triangle's if there is a single query; else it is the same for all queries.
    if (rows > 1 or t == 1) and torch.equal(kept, torch.ones_like(kept).tril(offset)):
        return Causal()
    if h == 1 and rows > 1 and offset + rows >= s:  # a triangle, and padding as its last row tells it?
        keys = kept[:, :, -1:]
        if torch.equal(kept, torch.ones_like(kept).tril(offset) & keys):
            padding = known(keys)
            return Causal() if padding is None else Causal() & padding
    if h == rows == 1:  # the same keys for all queries: padding on the right or on the left?
        n = kept.sum(-1).reshape(b)
        j = torch.arange(s, device=kept.device)
        if torch.equal(kept.reshape(b, s), j < n[:, None]):
            return Lengths(n)
        if torch.equal(kept.reshape(b, s), j >= s - n[:, None]):
            return Lengths(n, left=True)
    return Keep(kept)


# -- nn.MultiheadAttention -------------------------------------------------------------------------

_ARGUMENTS = signature(F.multi_head_attention_forward)


def _multi_head(func: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    bound = _ARGUMENTS.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    problem = _multi_head_problem(given)
    if not removing():
        weights: list[Tensor | None] = []

        def own() -> Tensor:
            out, weighed = func(*args, **kwargs)
            weights.append(weighed)
            return out

        return attend(problem, own, heads=None), weights[0]
    if given["need_weights"] and problem.dropout_p:
        raise ValueError(
            "a head can't be removed from nn.MultiheadAttention that drops weights and returns them: "
            "call model.eval(), or need_weights=False."
        )
    mixed = attend(problem, lambda: kernels.run(problem).out)  # [b, h, t, d]
    query = given["query"]
    out = F.linear(mixed.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"])
    out = out if query.dim() == 3 else out.squeeze(1)  # [t, b, e]
    if not given["need_weights"]:
        return out, None
    weighed = reference.weights(problem)[0].to(out.dtype)  # [b, h, t, s]
    if given["average_attn_weights"]:
        weighed = weighed.mean(1)
    return out, weighed if query.dim() == 3 else weighed.squeeze(0)


def _multi_head_problem(given: dict[str, Any]) -> Problem:
    """The problem that F.multi_head_attention_forward solves with these arguments."""
    query, key, value = given["query"], given["key"], given["value"]
    for name, x in (("query", query), ("key", key), ("value", value)):
        check(x, f"nn.MultiheadAttention's {name}")
    if given["static_k"] is not None or given["static_v"] is not None:
        raise ValueError(
            "static_k and static_v of multi_head_attention_forward can't be observed: pass key and value."
        )
    if query.dim() == 2:
        query, key, value = (x[:, None] for x in (query, key, value))  # [t, 1, e]
    if given["use_separate_proj_weight"]:
        maps = [given[f"{letter}_proj_weight"] for letter in "qkv"]
    else:
        maps = given["in_proj_weight"].chunk(3)
    shifts = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    q, k, v = (F.linear(*parts) for parts in zip((query, key, value), maps, shifts, strict=True))  # [t, b, e]
    (t, b, _), s, h = q.shape, k.shape[0], given["num_heads"]
    masks: dict[str, Tensor] = {}
    padding, attn_mask = given["key_padding_mask"], given["attn_mask"]
    # PyTorch believes the hint where it needs no mask tensor otherwise, and then uses nothing else.
    hinted = given["is_causal"] and padding is None and not given["need_weights"]
    if hinted:
        attn_mask = None
    if attn_mask is not None:
        masks["attn_mask"] = attn_mask.reshape((1, 1, t, s) if attn_mask.dim() == 2 else (b, h, t, s))
    if padding is not None:
        masks["key_padding_mask"] = padding.reshape(b, 1, 1, s)
    if given["bias_k"] is not None:
        k = torch.cat((k, given["bias_k"].expand(1, b, -1)))  # [s + 1, b, e]
        v = torch.cat((v, given["bias_v"].expand(1, b, -1)))
    if given["add_zero_attn"]:
        k, v = (torch.cat((x, x.new_zeros(1, b, x.shape[2]))) for x in (k, v))
    masks = {name: F.pad(x, (0, k.shape[0] - s)) for name, x in masks.items()}  # what is appended is seen
    mask, bias = translate(masks, shows=False)
    q, k, v = (x.unflatten(-1, (h, -1)).permute(1, 2, 0, 3) for x in (q, k, v))  # [b, h, t, d]
    dropout_p = given["dropout_p"] if given["training"] else 0.0
    mask = Causal() if hinted else mask
    return Problem.of(q, k, v, mask=mask, bias=bias, dropout_p=dropout_p, offset=0)


# -- the others ------------------------------------------------------------------------------------


def _flex(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    query, key, value, score_mod, block_mask, scale, *_ = args
    for name, x in (("query", query), ("key", key), ("value", value)):
        check(x, f"flex_attention's {name}")
    if getattr(score_mod, "__name__", "") != "_identity":
        raise ValueError(
            "flex_attention with a score_mod can't be observed, as a function may do anything: say it "
            "as a bias or softcap of manyheads.attention."
        )
    mask_mod = block_mask[-1]
    problem = Problem.of(query, key, value, mask=Rule(mask_mod), scale=scale, offset=0)
    results: list[Any] = []

    def own() -> Tensor:
        results.append(func(*args, **kwargs))
        return results[0][0]

    return (attend(problem, own), *results[0][1:])


def _by_name(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        f"the model calls the kernel {getattr(func, '__name__', func)} by its name, which can't be observed: "
        "call torch.nn.functional.scaled_dot_product_attention, which chooses it."
    )
