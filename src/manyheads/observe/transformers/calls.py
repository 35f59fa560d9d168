"""A call of an attention function, as transformers makes it, read as a `Problem`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from manyheads import kernels, scores
from manyheads.biases import Dense
from manyheads.masks import Causal, Keep, Mask, Window
from manyheads.observe.here import check
from manyheads.observe.intercept import shown, triangle
from manyheads.observe.transformers.masks import origin, padding, split, together
from manyheads.scores import Problem
from manyheads.shapes import kind, shape_of, sizes

Kernel = Callable[..., tuple[Tensor, Tensor | None]]

FIRST = ("module", "query", "key", "value", "attention_mask")

# What a kernel may name among its parameters beside module, query, key, value and mask; and what makes a
# flash kernel read its input in another way.
UNDERSTOOD = {"scaling", "dropout", "is_causal", "sliding_window", "softcap", "s_aux", "position_bias"}
PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "block_table"}

ROOM = 2**31  # bytes of weights that an eager kernel may build where ours could compute instead


def name_of(kernel: Kernel) -> str:
    """The name of a kernel that belongs to no model, by where it is written; "" for one not known here."""
    home = getattr(kernel, "__module__", "")
    shared = {f"transformers.integrations.{name}_attention": name for name in ("sdpa", "flash", "flex")}
    return shared.get(home, "")


@dataclass(frozen=True)
class Call:
    """One call of an attention function.

    query `[b, h, t, d]`, key `[b, g, s, d]`, value `[b, g, s, w]`; given is the mask, in whatever form the
    kernel reads; name is "sdpa", "flash", "flex", "eager" for a model's own, or "" for an unknown kernel.
    """

    kernel: Kernel
    name: str
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    given: Any
    options: Mapping[str, Any]
    named: frozenset[str]  # the options that the kernel names among its parameters

    @classmethod
    def of(cls, kernel: Kernel, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        told = (*args, *(kwargs.get(name) for name in FIRST[len(args) :]))
        module, query, key, value, given = told[:5]
        variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        # A kernel starts with these five, by whatever names; what follows them are its options.
        own = [one for one in signature(kernel).parameters.values() if one.kind not in variable][5:]
        options = {one.name: one.default for one in own if one.default is not Parameter.empty}
        options |= dict(zip((one.name for one in own), args[5:], strict=False))
        options |= {option: value for option, value in kwargs.items() if option not in FIRST}
        named = frozenset(one.name for one in own)
        return cls(kernel, name, module, query, key, value, given, options, named)

    def problem(self) -> Problem:
        """What is asked, as a problem; raises ValueError where something isn't understood."""
        strange = self.named - UNDERSTOOD | (PACKED if self.name == "flash" else set())
        asked = sorted(option for option in strange if self.options.get(option) is not None)
        if asked:
            raise self._refusal(f"its kernel is given {', '.join(asked)}, which manyheads doesn't know")
        for which, x in (("query", self.query), ("key", self.key), ("value", self.value)):
            check(x, f"{type(self.module).__name__}'s {which}")
        q, k, v = _autocast(self.query, self.key, self.value)
        if q.dim() == 4 and q.shape[0] == 1:
            q = q.expand(k.shape[0], -1, -1, -1)  # learned queries, shared by the batch
        n = shape_of(q, k, v)
        mask, bias, offset = self._mask(n.t, n.s)
        if (position := self.options.get("position_bias")) is not None and self._reads("position_bias"):
            hidden, position = split(position, offset, n.t)
            mask = together(mask, hidden)
            bias = position if bias is None else bias if position is None else bias + position
        drops = self.name != "eager" or self.module.training  # the others drop whatever they are told
        return Problem.of(
            q,
            k,
            v,
            mask=mask,
            bias=None if bias is None else Dense(bias),
            scale=self._number("scaling"),
            softcap=self._number("softcap"),
            sink=self._sink(n.h),
            dropout_p=(self._number("dropout") or 0.0) if drops else 0.0,
            offset=offset,
        )

    def _refusal(self, why: str) -> ValueError:
        return ValueError(f"the attention of {type(self.module).__name__} can't be observed: {why}.")

    def _reads(self, option: str) -> bool:
        """Shared kernels ignore what they don't name; a model's own may find it in its keywords."""
        return option in self.named or self.name in ("eager", "")

    def _number(self, option: str) -> float | None:
        value = self.options.get(option)
        if not isinstance(value, Tensor):
            return value
        if value.numel() != 1:
            raise self._refusal(f"its {option} is a tensor {sizes(value)}, and a number was expected")
        return value.item()

    def _sink(self, h: int) -> Tensor | None:
        sink = self.options.get("s_aux") if self._reads("s_aux") else None
        if sink is not None and sink.numel() != h:
            raise self._refusal(f"its sinks are {sizes(sink)}, and one for each of {h} heads was expected")
        return None if sink is None else sink.reshape(h)

    # -- masks: what the kernel hides, what it adds, and the position of row 0 -----------------------

    @property
    def _causal(self) -> bool:
        """Does a kernel hide what comes later, if it gets no mask?"""
        told = self.options.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if told is None else told)

    def _mask(self, t: int, s: int) -> tuple[Mask | None, Tensor | None, int]:
        given, offset = self.given, s - t if self._causal else 0
        if self.name == "flash":
            return self._flash(t, s)
        if given is None:
            return self._unmasked(t, s)
        entries = isinstance(given, Tensor) and (given.dtype == torch.bool or given.is_floating_point())
        if not entries and not hasattr(given, "mask_mod"):
            raise self._refusal(f"its mask is {kind(given)}, and a tensor of bool or floats was expected")
        if (made := origin(given, t, s)) is not None:
            offset = made.offset
            if (mask := made.mask(given)) is not None:
                return together(mask), None, offset
        elif entries and self._causal and given.dim() == 4:  # of a cache of a fixed size, perhaps
            offset = triangle(shown(given), t, offset)
        if not entries:  # flex's BlockMask
            from torch.nn.attention.flex_attention import create_mask

            b = self.key.shape[0]
            given = create_mask(given.mask_mod, b, 1, t, s, device=str(self.query.device))  # [b, 1, t, s]
        return *split(given, offset, t), offset

    def _unmasked(self, t: int, s: int) -> tuple[Mask | None, None, int]:
        """No mask: sdpa then goes by `is_causal`, from the top left, but for a single query."""
        if not self.name:
            name = getattr(self.kernel, "__name__", self.kernel)
            raise self._refusal(
                f"its kernel {name} isn't one of transformers' own and got no mask, which can mean causal too"
            )
        if self.name == "sdpa" and self._causal and t > 1:
            return Causal(), None, 0
        return None, None, s - t if self._causal else 0

    def _flash(self, t: int, s: int) -> tuple[Mask | None, None, int]:
        """Flash kernels get padding `[b, s]`, and make the rest themselves: causal from the bottom right."""
        given, window = self.given, self.options.get("sliding_window")
        if given is not None and (not isinstance(given, Tensor) or given.dim() != 2):
            raise self._refusal(f"its flash kernel's mask is {kind(given)}, and padding [b, s] was expected")
        n = s if given is None else given.shape[1]  # of a static cache, only so many keys are read
        mask: Mask | None = Causal() if self._causal else None
        if window is not None:
            mask = together(mask, Window(left=window - 1, right=window - 1))
        if given is not None:
            mask = together(mask, padding(given.bool(), s))
            if t > 1:  # queries of padding are left out too, and get zeros
                mask = together(mask, Keep(given.bool()[:, None, -t:, None]))
        return mask, None, n - t if self._causal else 0

    # -- a softcap or a sink leaves a model nothing but its eager kernel, which builds every weight ---

    def ours(self, problem: Problem) -> bool:
        """Is it for us to compute? Softcaps and sinks are, where eager would build more than `ROOM`."""
        n = problem.shape
        room = n.b * n.h * n.t * n.s * problem.q.element_size()
        eager_only = self.name == "eager" and (problem.softcap is not None or problem.sink is not None)
        config = getattr(self.module, "config", None)
        wanted = self.options.get("output_attentions", getattr(config, "output_attentions", False))
        return room > ROOM and eager_only and not wanted and not problem.dropout_p

    def compute(self, problem: Problem) -> Tensor:
        """The output `[b, t, h, w]` in O(L) memory, compared in a few rows with the eager kernel's."""
        rows = _rows(problem)
        options = dict(self.options)
        if "position_bias" in options:
            options["position_bias"] = _take(options["position_bias"], rows)
        few, mask = self.query[:, :, rows], _take(self.given, rows)
        eager, _ = self.kernel(self.module, few, self.key, self.value, mask, **options)  # [b, r, h, w]
        self.agree(problem, eager, some=True)
        _, out, lse = kernels.run(problem)  # [b, h, t, w], [b, h, t]
        if lse is not None:  # where all is masked, eager weighs all keys alike, and its output stays
            even = problem.v.mean(2, keepdim=True)  # [b, g, 1, w]
            even = even.repeat_interleave(problem.shape.h // problem.shape.g, 1)  # [b, h, 1, w]
            out = torch.where(lse[..., None] == -math.inf, even, out)
        return out.transpose(1, 2).contiguous()

    # -- the proof -----------------------------------------------------------------------------------

    @torch.no_grad()
    def agree(self, problem: Problem, out: Tensor, some: bool = False) -> None:
        """Raise unless the model's output `[b, t, h, w]` is what the formula gives, in a few rows.

        With `some`, out holds only those rows. The difference is taken on the whole, relative to what
        the weights make of |v|; what isn't finite, and rows that see nothing, don't count.
        """
        n, rows = problem.shape, _rows(problem)
        if not n.b * n.h * n.s * n.w * len(rows) or problem.dropout_p:
            return
        theirs = (out if some else out[:, rows]).transpose(1, 2).to(problem.dtype)  # [b, h, r, w]
        score = scores.tile(problem, rows)  # [b, h, r, s]
        seen = score != -math.inf
        lse = score.logsumexp(-1)  # [b, h, r]
        if problem.sink is not None:
            lse = torch.logaddexp(lse, problem.sink.to(lse.dtype)[:, None])
        weight = scores.fold(scores.weights(score, lse), n.g)  # [b, g, (h/g)·r, s]
        v = problem.v.to(problem.dtype)  # [b, g, s, w]
        with scores.exactly(v.device):
            ours, most = (scores.unfold(weight @ x, n.h) for x in (v, v.abs()))  # [b, h, r, w]
        told = ours.isfinite() & theirs.isfinite() & seen.any(-1, keepdim=True)
        apart = float((theirs - ours)[told].norm() / most[told].norm().clamp(min=1e-30))
        largest = float(score[seen & score.isfinite()].abs().amax()) if told.any() else 0.0
        if apart > max(1e-3, 4 * _rounding(problem, out) * (1 + largest)):
            raise self._refusal(
                f"in rows {rows.tolist()} its output is {apart:.1%} away from what its queries, keys, values "
                "and mask give, so its kernel does something that manyheads doesn't know"
            )


def _rows(problem: Problem) -> Tensor:
    """A few rows, from the first to the last."""
    t = problem.shape.t
    return torch.linspace(0, t - 1, min(t, 5), device=problem.q.device).round().long().unique()


def _take(x: Any, rows: Tensor) -> Any:
    """Some rows of a mask or a bias `[…, t or 1, s]`."""
    return x if x is None or x.shape[-2] == 1 else x[..., rows, :]


def _rounding(problem: Problem, out: Tensor) -> float:
    """The eps of the lowest precision that the model may have computed in."""
    if problem.q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return torch.finfo(torch.bfloat16).eps
    return max(torch.finfo(x.dtype).eps for x in (problem.q, out))


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v as PyTorch's own kernels cast them under autocast."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    low = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(low) for x in tensors)
