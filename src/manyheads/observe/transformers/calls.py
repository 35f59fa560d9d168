"""Translate calls of transformers' attention functions into a `Problem`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from manyheads import kernels, scores
from manyheads.biases import Dense
from manyheads.functional import autocast
from manyheads.masks import Causal, Keep, Mask, Window
from manyheads.masks.recognize import first_position, split_masks, visible
from manyheads.observe.intercept import check_readable
from manyheads.observe.transformers.masks import LazyMask, combine, find_origin, padding_mask
from manyheads.problem import Problem
from manyheads.shapes import kind, shape_of, sizes

Function = Callable[..., tuple[Tensor, Tensor | None]]

# The names of kernels that models share, by the module that defines them.
SHARED = {f"transformers.integrations.{name}_attention": name for name in ("sdpa", "flash", "flex")}
SHARED["manyheads.hf"] = "manyheads"

FIRST = ("module", "query", "key", "value", "attention_mask")

# Options of kernels that a Problem supports, and those of flash kernels for packed inputs, which it doesn't.
SUPPORTED = {"scaling", "dropout", "is_causal", "sliding_window", "softcap", "s_aux", "position_bias"}
PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "block_table"}

# If an eager kernel would build more bytes of weights, manyheads computes the output.
MAX_EAGER_BYTES = 2**31


@dataclass
class Kernel:
    """An attention function of transformers, with its parameters after the first five (`FIRST`).

    Its name is "sdpa", "flash", "flex", "manyheads", "eager" (a model's own function), or "" (unknown).
    """

    function: Function
    name: str
    options: tuple[str, ...]
    defaults: Mapping[str, Any]

    @cached_property
    def unsupported(self) -> set[str]:
        """The options that a Problem doesn't support."""
        return set(self.options) - SUPPORTED | (PACKED if self.name == "flash" else set())

    @classmethod
    def of(cls, function: Function, name: str | None = None) -> Kernel:
        """Return a function as a kernel. Its first five parameters mean `FIRST`, whatever their names."""
        if name is None:
            name = SHARED.get(getattr(function, "__module__", ""), "")
        variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        options = [each for each in signature(function).parameters.values() if each.kind not in variable][5:]
        defaults = {each.name: each.default for each in options if each.default is not Parameter.empty}
        return cls(function, name, tuple(each.name for each in options), defaults)

    def reads(self, option: str) -> bool:
        """Return True if the kernel may use an option; a model's own kernel may read it from `**kwargs`."""
        return option in self.options or self.name in ("eager", "")


@dataclass(frozen=True)
class Call:
    """One call of an attention function.

    It has query `[b, h, t, d]`, key `[b, g, s, d]`, value `[b, g, s, w]`, and a mask in the kernel's format.
    """

    kernel: Kernel
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    options: Mapping[str, Any]

    @classmethod
    def of(cls, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return a call of a kernel with these arguments."""
        module, query, key, value, mask = (*args, *map(kwargs.get, FIRST[len(args) :]))[:5]
        options = {**kernel.defaults, **dict(zip(kernel.options, args[5:], strict=False)), **kwargs}
        for name in FIRST:
            options.pop(name, None)
        return cls(kernel, module, query, key, value, mask, options)

    def problem(self) -> Problem:
        """Return the call as a problem; raise ValueError if a part of it isn't supported."""
        for option in sorted(self.kernel.unsupported):
            if self.options.get(option) is not None:
                raise self.error(f"its kernel is called with {option}, which manyheads doesn't support")
        check_readable(type(self.module).__name__, query=self.query, key=self.key, value=self.value)
        (q, k, v), options = self.arguments()
        return Problem.of(q, k, v, **options)

    def arguments(self) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """Return q, k and v, and the other arguments of `attention` that compute the same."""
        q, k, v = autocast(self.query, self.key, self.value)
        if q.dim() == 4 and q.shape[0] == 1:
            q = q.expand(k.shape[0], -1, -1, -1)  # learned queries, shared by the batch
        shape = shape_of(q, k, v)
        mask, tensors, offset = self._read_mask(shape.t, shape.s)
        position_bias = self.options.get("position_bias")
        if position_bias is not None and self.kernel.reads("position_bias"):
            tensors["position_bias"] = position_bias
        bias = None
        if tensors:
            # A bias that is learned gets its gradient if manyheads computes the output.
            dense, added = split_masks(tensors, offset, shape.t, detach=self.kernel.name != "manyheads")
            mask, bias = combine(mask, dense), None if added is None else Dense(added)
        sink = self.options.get("s_aux")
        if sink is not None:
            if sink.numel() != shape.h:
                raise self.error(f"expected one sink for each of {shape.h} heads, got {sizes(sink)}")
            sink = sink.reshape(shape.h) if self.kernel.reads("s_aux") else None
        scale, softcap, dropout_p = self._read_numbers("scaling", "softcap", "dropout")
        if dropout_p is None or (self.kernel.name == "eager" and not self.module.training):
            dropout_p = 0.0  # the other kernels apply it in evaluation too
        return (q, k, v), {
            "mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sink": sink,
            "dropout_p": dropout_p, "offset": offset,
        }  # fmt: skip

    def error(self, reason: str) -> ValueError:
        """Return the error for a call with something that isn't supported."""
        name = type(self.module).__name__
        if self.kernel.name == "manyheads":
            return ValueError(
                f"The attention of {name} can't run on manyheads: {reason}. "
                'Load the model with attn_implementation="eager".'
            )
        return ValueError(
            f"The attention of {name} can't be observed: {reason}. "
            'Load the model with attn_implementation="sdpa".'
        )

    def _read_numbers(self, *options: str) -> list[Any]:
        values = list(map(self.options.get, options))
        for n, value in enumerate(values):
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise self.error(f"expected its {options[n]} to be a number, got {sizes(value)}")
                values[n] = value.item()
        return values

    # -- masks ------------------------------------------------------------------------------------

    def _read_mask(self, t: int, s: int) -> tuple[Mask | None, dict[str, Tensor], int]:
        """Return the mask as a value, mask tensors that aren't recognized yet, and the position of row 0."""
        mask, is_causal = self.mask, self.options.get("is_causal")
        if is_causal is None:  # the kernel's default if it gets no mask
            is_causal = is_causal_by_default(self.module, self.kernel.name)
        if self.kernel.name == "flash":
            return self._read_flash_mask(t, s, is_causal)
        if mask is None:
            if not self.kernel.name:
                name = getattr(self.kernel.function, "__name__", self.kernel.function)
                raise self.error(
                    f"its kernel {name} isn't one of transformers' own and got no mask, which may mean that "
                    "nothing is masked or that it is causal"
                )
            # sdpa then uses is_causal, which counts from the top left, unless there is a single query.
            if self.kernel.name in ("sdpa", "manyheads") and is_causal and t > 1:
                return Causal(), {}, 0
            return None, {}, s - t if is_causal else 0
        is_tensor = isinstance(mask, Tensor) and (mask.dtype == torch.bool or mask.is_floating_point())
        if not is_tensor and not hasattr(mask, "mask_mod"):
            raise self.error(f"expected its mask to be a tensor of bool or floats, got {kind(mask)}")
        if isinstance(mask, LazyMask):
            if not mask.is_dense and tuple(mask.shape[2:]) == (t, s):
                return combine(mask.value), {}, mask.offset
            mask = mask.dense()
        offset = s - t if is_causal else 0
        origin = find_origin(mask, t, s)
        if origin is not None:
            offset = origin.offset
            value = origin.mask(mask)
            if value is not None:
                return combine(value), {}, offset
        elif is_tensor and is_causal and mask.dim() == 4:  # perhaps the mask of a cache of fixed size
            offset = first_position(visible(mask), t, offset)
        if not is_tensor:  # flex's BlockMask
            from torch.nn.attention.flex_attention import create_mask

            b, device = self.key.shape[0], str(self.query.device)
            mask = create_mask(mask.mask_mod, b, 1, t, s, device=device)  # [b, 1, t, s]
        return None, {"attention_mask": mask}, offset

    def _read_flash_mask(self, t: int, s: int, is_causal: bool) -> tuple[Mask | None, dict[str, Tensor], int]:
        """Read the mask of a flash kernel: padding `[b, s]`; the kernel is causal from the bottom right."""
        padding, window = self.mask, self.options.get("sliding_window")
        if padding is not None and (not isinstance(padding, Tensor) or padding.dim() != 2):
            raise self.error(f"expected its flash kernel's mask to be padding [b, s], got {kind(padding)}")
        n = s if padding is None else padding.shape[1]  # the keys that are read, if the cache is static
        parts: list[Mask] = [Causal()] if is_causal else []
        if window is not None:
            parts.append(Window(left=window - 1, right=window - 1))
        if padding is not None:
            parts.append(padding_mask(padding.bool(), s))
            if t > 1:  # flash kernels skip the queries of padding too, and return zeros for them
                parts.append(Keep(padding.bool()[:, None, -t:, None]))
        return combine(*parts), {}, n - t if is_causal else 0

    # -- large calls of eager kernels, the only kernels of models with a softcap or a sink -----------

    def is_too_large(self, problem: Problem) -> bool:
        """Return True if manyheads should compute the output, because eager weights need too much memory."""
        shape = problem.shape
        if shape.b * shape.h * shape.t * shape.s * problem.q.element_size() <= MAX_EAGER_BYTES:
            return False
        eager_only = self.kernel.name == "eager" and (problem.softcap is not None or problem.sink is not None)
        config = getattr(self.module, "config", None)
        returns_weights = self.options.get("output_attentions", getattr(config, "output_attentions", False))
        return eager_only and not returns_weights and not problem.dropout_p

    def compute(self, problem: Problem) -> Tensor:
        """Return the output `[b, t, h, w]`, in O(L) memory; a few rows are compared with the eager kernel."""
        rows = _sample_rows(problem)
        options = dict(self.options)
        if "position_bias" in options:
            options["position_bias"] = _take_rows(options["position_bias"], rows)
        query, mask = self.query[:, :, rows], _take_rows(self.mask, rows)
        eager, _ = self.kernel.function(self.module, query, self.key, self.value, mask, **options)
        self.compare(problem, eager, only_rows=True)  # [b, r, h, w]
        _, out, lse, _ = kernels.run(problem)  # [b, h, t, w], [b, h, t]
        if lse is not None:  # in fully masked rows, eager attention gives all keys the same weight
            mean = problem.v.mean(2, keepdim=True)  # [b, g, 1, w]
            mean = mean.repeat_interleave(problem.shape.h // problem.shape.g, 1)  # [b, h, 1, w]
            out = torch.where(lse[..., None] == -math.inf, mean, out)
        return out.transpose(1, 2).contiguous()

    # -- the check that the call was translated correctly --------------------------------------------

    @torch.no_grad()
    def compare(self, problem: Problem, out: Tensor, only_rows: bool = False) -> None:
        """Check that a few rows of the model's output equal those of the formula; raise ValueError if not.

        The norm of their difference is divided by the norm of the weights times |v|. Non-finite numbers and
        fully masked rows are excluded.

        Args:
            problem: The call, as it was translated.
            out: The model's output `[b, t, h, w]`.
            only_rows: If True, out contains only these rows.
        """
        shape, rows = problem.shape, _sample_rows(problem)
        if not shape.b * shape.h * shape.s * shape.w * len(rows) or problem.dropout_p:
            return
        theirs = (out if only_rows else out[:, rows]).transpose(1, 2).to(problem.dtype)  # [b, h, r, w]
        score = scores.tile(problem, rows)  # [b, h, r, s]
        kept = score != -math.inf
        lse = score.logsumexp(-1)  # [b, h, r]
        if problem.sink is not None:
            lse = torch.logaddexp(lse, problem.sink.to(lse.dtype)[:, None])
        weight = scores.fold(scores.weights(score, lse), shape.g)  # [b, g, (h/g)·r, s]
        v = problem.v.to(theirs.dtype)  # [b, g, s, w]
        with scores.disable_autocast(v.device):
            ours, largest = scores.unfold(weight @ torch.cat((v, v.abs()), -1), shape.h).chunk(2, -1)
        counts = ours.isfinite() & theirs.isfinite() & kept.any(-1, keepdim=True)
        difference = float((theirs - ours)[counts].norm() / largest[counts].norm().clamp(min=1e-30))
        score_size = float(score[kept & score.isfinite()].abs().amax()) if counts.any() else 0.0
        if difference > max(1e-3, 4 * _rounding(problem, out) * (1 + score_size)):
            raise self.error(
                f"in rows {rows.tolist()} its output differs by {difference:.1%} from attention with its "
                "queries, keys, values and mask, so its kernel computes something else"
            )


def is_causal_by_default(module: nn.Module, kernel: str = "manyheads") -> bool:
    """Return True if a call without a mask is causal.

    Our kernel then computes what the model's default kernel does: `sdpa` is causal unless the module says
    that it isn't, and a model that doesn't support `sdpa` has an eager kernel, which masks nothing.
    """
    if kernel == "manyheads" and not supports_sdpa(type(module)):
        return False
    return bool(getattr(module, "is_causal", True))


_supporting: dict[type, bool] = {}  # not functools.cache: `hf` marks the function for torch.compile


def supports_sdpa(kind_of_module: type) -> bool:
    """Return True if a model that is defined beside this kind of module supports `sdpa`."""
    if kind_of_module not in _supporting:
        homes = [sys.modules.get(base.__module__) for base in kind_of_module.__mro__]
        names = [[] if home is None else [*vars(home).values()] for home in homes]
        flags = [[each._supports_sdpa for each in some if hasattr(each, "_supports_sdpa")] for some in names]
        _supporting[kind_of_module] = any(next(filter(None, flags), []))
    return _supporting[kind_of_module]


def _sample_rows(problem: Problem) -> Tensor:
    """Return up to five rows, evenly spaced from the first to the last."""
    t = problem.shape.t
    return torch.linspace(0, t - 1, min(t, 5), device=problem.q.device).round().long().unique()


def _take_rows(x: Any, rows: Tensor) -> Any:
    """Return some rows of a mask or a bias `[…, t or 1, s]`."""
    return x if x is None or x.shape[-2] == 1 else x[..., rows, :]


def _rounding(problem: Problem, out: Tensor) -> float:
    """Return the eps of the lowest precision in which the model may have computed."""
    if problem.q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return torch.finfo(torch.bfloat16).eps
    return max(torch.finfo(problem.q.dtype).eps, torch.finfo(out.dtype).eps)
